"""llama.cpp's HTTP server on a GGUF file, on a free port of 127.0.0.1: serve_llamacpp.py MODEL ALIAS SLOTS

Prints one line "listening URL" when it serves, and ends when its standard input is closed, which
happens when its parent ends in whatever way.
"""

from __future__ import annotations

import os
import sys

import xllamacpp

CONTEXT_TOKENS_PER_SLOT = 2048


def main(model: str, alias: str, slots: int) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.model_alias = {alias}
    params.n_parallel = slots
    params.n_ctx = slots * CONTEXT_TOKENS_PER_SLOT
    params.cpuparams.n_threads = 1  # more threads spin against whatever else runs on a small machine
    params.cpuparams_batch.n_threads = 1
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.endpoint_metrics = True
    params.warmup = False
    params.sampling.temp = (
        1.0  # plain sampling: the model's own end token then comes as often as it was made to
    )
    params.sampling.top_k = 0
    params.sampling.top_p = 1.0
    params.sampling.min_p = 0.0
    server = xllamacpp.Server(params)
    print("listening", server.listening_address, flush=True)
    sys.stdin.read()
    os._exit(0)  # requests that are still being served do not keep it


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

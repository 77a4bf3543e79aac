"""llama.cpp's HTTP server on 127.0.0.1.

By hand: ``serve_llamacpp.py`` alone makes a tiny model of chance and serves it until Ctrl-C. From
tests: ``serve_llamacpp.py MODEL ALIAS SLOTS`` serves a GGUF file on a free port, prints one line
"listening URL", and ends when its standard input is closed, which happens when its parent ends.
"""

import contextlib
import os
import sys
import tempfile
import threading
from pathlib import Path

import xllamacpp

CONTEXT_TOKENS_PER_SLOT = 2048


def main(model: str, alias: str, slots: int, by_hand: bool = False) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.model_alias = {alias}
    params.n_parallel = slots
    params.n_ctx = slots * CONTEXT_TOKENS_PER_SLOT
    params.cpuparams.n_threads = (
        1  # more threads spin against whatever else runs on a small machine
    )
    params.cpuparams_batch.n_threads = 1
    params.hostnames = ["127.0.0.1"]
    params.port = 8102 if by_hand else 0
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
    if by_hand:
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    else:
        sys.stdin.read()
    os._exit(0)  # requests that are still being served do not keep it


if __name__ == "__main__":
    if len(sys.argv) == 1:
        from tiny_gguf import make_tiny_model, write_gguf

        with tempfile.TemporaryDirectory() as folder:
            write_gguf(make_tiny_model(), Path(folder) / "tiny.gguf")
            main(str(Path(folder) / "tiny.gguf"), "tiny", 8, by_hand=True)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

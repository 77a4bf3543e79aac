"""Point users of other tools to the options of this one."""

from typing import Any

# what is set; our options, of which a command has one; the names of other tools
_ROWS = """
the rate; --rates; rate rates qps rps request-rate request-rates requests-per-second
the rate; --rates; arrival-rate rate-type
the number in flight; --concurrency; concurrency max-concurrency concurrent parallel users u vus
the number in flight; --concurrency; num-concurrent num-users clients concurrencies
the number of requests; --max-requests; num-prompts num-requests max-num-requests n requests
the number of requests; --max-requests; request-count iterations
the length of a stage; --duration --max-duration; duration run-time max-seconds max-duration
the length of a stage; --duration --max-duration; measurement-interval benchmark-duration
the prompts' length; --input-tokens; random-input-len input-len isl prompt-tokens prompt-len
the prompts' length; --input-tokens; mean-input-tokens synthetic-input-tokens-mean
the answers' length; --output-tokens; random-output-len output-len osl mean-output-tokens
the answers' length; --output-tokens; output-tokens-mean max-new-tokens
a file of prompts; --prompts; dataset dataset-name dataset-path data input-file
the warm-up; --warmup; num-warmups warmup-requests warmup-request-count
the users' slow begin; --ramp; ramp-up rampup spawn-rate
the limit of latency; --slo; goodput threshold thresholds
the API; --api; backend endpoint-type
the server; URL; url base-url host target
the key; --api-key-env; api-key key token
the body's further fields; --extra-body; extra-inputs extra-request-body sampling-params
the run directory; --out; output output-dir output-path result-dir artifact-dir
"""
_TABLE = [[cell.split() for cell in row.split(";")] for row in _ROWS.strip().splitlines()]
OF_PLAN = "peak-rps gpu-hour mean-rps utilisation safety accepted prices profile tier"


def our_name(error: Any) -> str | None:
    """Return the message for an unknown option that another tool or command has; else None."""
    asked = str(getattr(error, "option_name", "")).lstrip("-")
    found = next(((" ".join(what), ours) for what, ours, theirs in _TABLE if asked in theirs), None)
    if asked in OF_PLAN.split() and hasattr(error, "possibilities"):
        option = error.option_name
        return f"no such option {option}; a fleet is sized by: ampacity plan RUN {option}"
    if not found or not hasattr(error, "possibilities"):  # as of an option that lacks its value
        return None
    what, ours = found
    has = {name for p in error.ctx.command.params for name in p.opts}
    if not has & {"--extra-body", "--rates"}:
        return None
    has |= {"URL"} if "--extra-body" in has else set()
    given = next(
        (f"given by {name}" for name in ours if name in has),
        f"not given to {error.ctx.command_path} ({ours[0]} is of other commands)",
    )
    return f"no such option {error.option_name}; {what} is {given}"

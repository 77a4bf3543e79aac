"""Find the request fields that a server accepts, by a first small request."""

import asyncio
import dataclasses
import re
from collections.abc import Callable

from ampacity.loadgen.net.http import Client
from ampacity.loadgen.plan import RETRY_PAUSE_MAX_S
from ampacity.loadgen.probe.ask import REFUSED, ask, refuses_field
from ampacity.loadgen.probe.results import Served
from ampacity.loadgen.receive.exchange import SEVERAL
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import Endpoint, EndpointError
from ampacity.loadgen.send.protocols import Api, Dialect, RequestShape
from ampacity.loadgen.send.secrets import redact

SHORT_TOKENS = 32  # of the local tokenizer, in the prompt of the first request
FIRST_REPEATS = 2  # of a first request that failed
REPEAT_PAUSE_S = 0.2
DIALECTS = (  # from the fullest to the plainest: the first that is accepted is used
    Dialect(),
    Dialect(ignore_eos=False),
    Dialect(continuous_usage=False),
    Dialect(ignore_eos=False, continuous_usage=False),
    Dialect(ignore_eos=False, continuous_usage=False, stream_usage=False),
)
# Gemini and LiteLLM answer 400 or 500 for want of a key, others an error event under 200
_FOR_A_KEY = re.compile(r"api.?key|\bauth|credential|access token", re.IGNORECASE)
KEY_HINT = "key? No API key was sent: put it into a variable and name it with --api-key-env"


def key_error(endpoint: Endpoint, error: str) -> str:
    """Return one line for an endpoint that refuses with ``error``, as "HTTP 401: wrong key"."""
    text = redact(error, endpoint.secrets)
    if endpoint.keys:
        return f"{endpoint.url} refuses the API key ({text}); check {endpoint.keys.option}"
    hint = "put it into a variable and name it with --api-key-env"
    return f"{endpoint.url} wants an API key ({text}); {hint}"


async def _ask_repeatedly(client: Client, api: Api, request: bytes) -> RequestRecord:
    """Send a request, and again if it fails for a reason that may pass."""
    record = await ask(client, api, request)
    for _ in range(FIRST_REPEATS):
        for_good = 400 <= (record.http_status or 0) < 429 and record.status != "too_long"
        if record.status in ("ok", "timeout") or for_good:
            break
        if (pause_s := max(record.retry_after_s or 0.0, REPEAT_PAUSE_S)) > RETRY_PAUSE_MAX_S:
            break
        await asyncio.sleep(pause_s)
        record = await ask(client, api, request)
    return record


async def find_dialect(
    client: Client,
    endpoint: Endpoint,
    shape: RequestShape,
    served: Served,
    send: Callable[[RequestShape, int, int], bytes],
) -> tuple[RequestShape, RequestRecord, list[str]]:
    """Return the first shape that the server accepts. Raises EndpointError with its message."""
    notes: list[str] = []
    first: RequestRecord | None = None
    max_tokens_field = shape.dialect.max_tokens_field
    for dialect in DIALECTS:
        tried = dataclasses.replace(
            shape, dialect=dataclasses.replace(dialect, max_tokens_field=max_tokens_field)
        )
        record = await _ask_repeatedly(client, shape.api, send(tried, SHORT_TOKENS, 4))
        renamed = max_tokens_field == "max_completion_tokens"  # once is enough
        if (
            not renamed
            and record.http_status in REFUSED
            and "max_completion_tokens" in (record.error or "")
        ):
            max_tokens_field = "max_completion_tokens"
            tried = dataclasses.replace(
                shape, dialect=dataclasses.replace(dialect, max_tokens_field=max_tokens_field)
            )
            record = await ask(client, shape.api, send(tried, SHORT_TOKENS, 4))
        first = first or record
        if record.status == "ok":
            if not dialect.ignore_eos:
                notes.append("the server refuses ignore_eos: answers end where the model ends them")
            if not dialect.stream_usage:
                notes.append("the server refuses stream_options: tokens are counted as chunks")
            if served.models and shape.model not in served.models:
                notes.append(
                    f"the server lists {', '.join(served.models[:10])} but answers to "
                    f"{shape.model!r} too: is that the model you mean?"
                )
            return tried, record, notes
        if not refuses_field(record):
            break
    raise EndpointError(_refusal(endpoint, shape, served, first or record))


def _refusal(endpoint: Endpoint, shape: RequestShape, served: Served, record: RequestRecord) -> str:
    """Return one line that names the culprit of a failed first request."""
    error = record.error or record.status
    if record.http_status in (401, 403):
        return key_error(endpoint, error)
    url, model = endpoint.url, shape.model
    unlisted = served.models and shape.model not in served.models
    if unlisted and record.http_status in (400, 404, 422):  # else it failed for another reason
        served_models = ", ".join(served.models[:10])
        return f"--model {model}: {url} does not serve it ({error}); it serves: {served_models}"
    if record.http_status == 404:
        hint = f"does the URL end in /v1, and is --model {model} right?"
        return f"{url}: no such route or model ({error}); {hint}"
    for_a_key = _FOR_A_KEY.search(error) or (
        (record.http_status or 0) >= 500 and "internal server error" in error.lower()
    )
    hint = f"; {KEY_HINT}" if for_a_key and not endpoint.has_key else ""
    if SEVERAL in error and shape.extra:
        hint = f"; which field of --extra-body ({', '.join(sorted(shape.extra))}) asks for them?"
    again = (
        f" {FIRST_REPEATS + 1} of {FIRST_REPEATS + 1} times"
        if record.status != "timeout" and (record.http_status or 500) >= 429
        else ""
    )
    return f"{url}: a first small request failed{again} as {record.status}: {error}{hint}"

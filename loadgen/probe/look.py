"""Probe an endpoint before the load begins: is it reachable, and what does it serve?

Every refusal is one line that names the culprit. The probe sends at most eight small requests;
they are not part of the run's records.
"""

import dataclasses
import json
from typing import Any

from ampacity.loadgen.net.pages import NoConnectionError, Page, PageError, Pages
from ampacity.loadgen.probe.dialect import KEY_HINT, key_error
from ampacity.loadgen.probe.gateways import gateway_of
from ampacity.loadgen.probe.results import Served
from ampacity.loadgen.send.endpoint import Endpoint, EndpointError, shown_url
from ampacity.loadgen.send.protocols import error_text, printable
from ampacity.loadgen.send.secrets import redact

LOOK_TIMEOUT_S = 10.0
MODELS_MAX = 1000
UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"  # OpenSSL's name of the reason


async def look(pages: Pages, endpoint: Endpoint, model: str | None = None) -> Served:
    """Fetch the list of models and the version. Raises EndpointError if the run cannot follow.

    Secrets that the server repeats are redacted, except in ``model``, which the user gave.
    """
    models = await _get(pages, endpoint, endpoint.models_url)
    if models.status in (401, 403) and model is None:  # the first request shows it else
        error = f"HTTP {models.status}: {error_text(models.body)}"
        raise EndpointError(key_error(endpoint, error))
    server = models.headers.get("server")
    trouble = f"HTTP {models.status}: {redact(error_text(models.body), endpoint.secrets)}"
    served = Served(listed=models.status == 200, trouble=trouble if models.status >= 500 else None)
    if models.status == 200:
        served = _read_models(served, models.body)
    try:
        page = await _get(pages, endpoint, f"{endpoint.root}/version")
        version = json.loads(page.body).get("version") if page.status == 200 else None
    except (EndpointError, ValueError, AttributeError, RecursionError):
        version = None

    def redacted(text: object) -> str | None:
        return redact(printable(text), endpoint.secrets) if isinstance(text, str) else None

    return dataclasses.replace(
        served,
        models=tuple(m if m == model else redact(m, endpoint.secrets) for m in served.models),
        engine=redacted(served.engine),
        engine_version=redacted(version),
        server=redacted(server),
        gateway=redacted(gateway_of(models.headers, served.engine)),
    )


def _read_models(served: Served, body: bytes) -> Served:
    try:
        entries = [
            e
            for e in json.loads(body)["data"]
            if isinstance(e, dict) and isinstance(e.get("id"), str)
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        return served
    first: dict[str, Any] = entries[0] if entries else {}
    owner, length = first.get("owned_by"), first.get("max_model_len")
    meta = first.get("meta")
    if not isinstance(length, int) and isinstance(meta, dict):
        length = meta.get("n_ctx")
    believable = isinstance(length, int) and not isinstance(length, bool) and 16 <= length < 2**31
    return dataclasses.replace(
        served,
        models=tuple(printable(e["id"]) for e in entries[:MODELS_MAX]),
        engine=owner if isinstance(owner, str) else None,
        max_model_len=length if believable else None,
    )


async def _get(pages: Pages, endpoint: Endpoint, url: str) -> Page:
    try:
        page = await pages.get(url, endpoint.all_headers(), LOOK_TIMEOUT_S)
    except TimeoutError as error:
        raise EndpointError(
            f"{endpoint.url} does not answer within {LOOK_TIMEOUT_S:g} s"
        ) from error
    except NoConnectionError as error:
        hint = _hint(endpoint, error) if "SSL" in str(error) else "is the server running?"
        raise EndpointError(f"cannot connect to {endpoint.url}: {error}; {hint}") from error
    except PageError as error:
        hint = _hint(endpoint, error)
        raise EndpointError(
            f"{endpoint.url} does not speak HTTP as expected: {error}; {hint}"
        ) from error
    if page.status == 407:
        raise EndpointError(
            f"{endpoint.url}: the proxy on the way wants a user name and password (HTTP 407): "
            "write them into HTTP_PROXY, as http://USER:PASSWORD@HOST:PORT"
        )
    if 300 <= page.status < 400 and "location" in page.headers:
        place = redact(printable(shown_url(page.headers["location"])), endpoint.secrets)
        raise EndpointError(f"{url} redirects to {place}: give the final base URL")
    return page


def _hint(endpoint: Endpoint, failed: Exception) -> str:
    """Return what may mend a connection that TLS or HTTP did not get through."""
    if "is not valid for" in str(failed):  # OpenSSL's words for a host name and for an address
        return "use the name that its certificate was issued for in the URL"
    if "has expired" in str(failed) or "not yet valid" in str(failed):
        return "renew the server's certificate, or set this machine's clock right"
    if UNTRUSTED in str(failed):
        return (
            "its certificate must be one that this machine trusts "
            "(--cacert or SSL_CERT_FILE names others)"
        )
    if "CERTIFICATE_REQUIRED" in str(failed):
        return "it asks for a client certificate: give --cert"
    other = "https" if endpoint.scheme == "http" else "http"
    return f"is it {other}://{endpoint.authority}{endpoint.path}?"


def choose_model(served: Served, model: str | None, endpoint: Endpoint) -> str:
    """Return the user's model, or the only one served. Raises EndpointError."""
    if model is not None:
        return model
    if len(served.models) == 1 and "***" not in served.models[0]:  # not redacted
        return served.models[0]
    if served.trouble:
        hint = "name a model with --model" if endpoint.has_key else KEY_HINT
        raise EndpointError(f"{endpoint.url}/models answers {served.trouble}; {hint}")
    if not served.listed:
        hint = "" if endpoint.path.endswith("/v1") else f"; should the URL be {endpoint.url}/v1?"
        raise EndpointError(f"{endpoint.url} has no /models: name a model with --model{hint}")
    there = f"it serves: {', '.join(served.models[:10])}" if served.models else "it lists no models"
    raise EndpointError(f"{endpoint.url}: name a model with --model; {there}")

"""Which gateway stands before the engine, by the headers of an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping

# what the routers of vLLM and SGLang, which are of one stock, make of a request without an id
_ROUTERS_ID = re.compile(r"(chatcmpl|cmpl|gnt|resp|req)-[A-Za-z0-9]{24}")
_SERVERS = {  # the beginning of ``server`` or the end of ``via``: who writes it
    "envoy": "Envoy",
    "istio-envoy": "Envoy (Istio)",
    "nginx": "nginx",
    "openresty": "nginx (OpenResty)",
    "cloudflare": "Cloudflare",
    "kong": "Kong",
    "caddy": "Caddy",
    "awselb": "AWS load balancer",
    "apisix": "APISIX",
}
_NAMES = {
    "x-envoy-": "Envoy",
    "x-kong-": "Kong",
    "cf-ray": "Cloudflare",
    "apim-request-id": "Azure API Management",
}


def gateway_of(headers: Mapping[str, str], engine: str | None = None) -> str | None:
    """The gateway with its version where that is said; None where none shows itself.

    ``headers``: their names in lower case; ``engine``: who owns the models, which tells the two routers apart.
    """
    if any(name.startswith("x-litellm-") for name in headers):
        return " ".join(filter(None, ("LiteLLM", headers.get("x-litellm-version"))))
    if (
        _ROUTERS_ID.fullmatch(headers.get("x-request-id", ""))
        and "x-envoy-upstream-service-time" not in headers
    ):
        return {"vllm": "vLLM router", "sglang": "SGLang router"}.get(
            (engine or "").lower(), "vLLM or SGLang router"
        )
    said = [headers.get("server", ""), *headers.get("via", "").split()[1:2]]
    for text in said:
        name, _, version = text.strip().partition("/")
        if known := _SERVERS.get(name.lower()):
            return " ".join(filter(None, (known, version.split(" ")[0])))
    return next(
        (known for start, known in _NAMES.items() if any(n.startswith(start) for n in headers)),
        None,
    )

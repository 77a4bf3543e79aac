"""Recognise the gateway in front of the engine by the headers of an answer."""

import re
from collections.abc import Mapping

# the request ids that the routers of vLLM and SGLang (one code base) generate
_ROUTERS_ID = re.compile(r"(chatcmpl|cmpl|gnt|resp|req)-[A-Za-z0-9]{24}")
_SERVERS = {  # product name in ``server`` or ``via``
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
    """Return the gateway, with its version if given; None if none is recognised.

    ``headers``: names in lower case; ``engine``: the owner of the models, which tells the vLLM and
    SGLang routers apart.
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

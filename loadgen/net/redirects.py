"""Resolve a base URL that redirects, once, before the load begins.

A redirect costs an extra request each time, and a POST may lose its body, so the load goes to the
final URL directly. A redirect during the load is an ``http_error``.
"""

import dataclasses
from urllib.parse import urljoin

from ampacity.loadgen.net.pages import PageError, Pages
from ampacity.loadgen.send.endpoint import Endpoint, EndpointError, parse_endpoint, shown_url
from ampacity.loadgen.send.protocols import printable
from ampacity.loadgen.send.secrets import redact

LOOK_TIMEOUT_S = 10.0
_STATUSES = (301, 302, 307, 308)
_ASKED = "/models"


async def final_endpoint(pages: Pages, endpoint: Endpoint) -> Endpoint:
    """Return the endpoint that /models redirects to, or ``endpoint`` if it does not.

    Raises EndpointError if the redirect cannot be followed. The probe reports missing answers.
    """
    try:
        page = await pages.get(endpoint.models_url, endpoint.all_headers(), LOOK_TIMEOUT_S)
    except (TimeoutError, PageError):
        return endpoint
    location = page.headers.get("location") if page.status in _STATUSES else None
    return endpoint if location is None else moved(endpoint, location)


def moved(endpoint: Endpoint, location: str) -> Endpoint:
    """Return the endpoint whose /models is at ``location``, with the same key and headers.

    Raises EndpointError if that is no base URL, contains a secret, or if secrets would go to
    another host or port (except from http:80 to https:443) or from https to http.
    """
    target = urljoin(endpoint.url + _ASKED, location)
    shown = f"{endpoint.url} redirects to {redact(printable(shown_url(target)), endpoint.secrets)}"
    bare = target.partition("?")[0].rstrip("/")
    if not bare.endswith(_ASKED):
        raise EndpointError(f"{shown}: that is no base URL; give the final one")
    try:
        found = parse_endpoint(bare.removesuffix(_ASKED))
    except EndpointError as error:
        why = redact(printable(str(error)), endpoint.secrets)
        raise EndpointError(f"{shown}: {why}") from error
    unsaid = tuple(secret for secret in endpoint.secrets if secret not in endpoint.url)
    if redact(found.url, unsaid) != found.url:
        raise EndpointError(
            f"{shown}: the key or the value of a --header is part of it; give the final base URL"
        )
    here, there = (endpoint.scheme, endpoint.port), (found.scheme, found.port)
    same = found.host == endpoint.host and (
        here == there or (here, there) == (("http", 80), ("https", 443))
    )
    if not same and (endpoint.keys or endpoint.headers):
        raise EndpointError(
            f"{shown}: the API key and --header are not sent to another server; give that URL"
        )
    parts = {name: getattr(found, name) for name in ("url", "scheme", "host", "port", "path")}
    return dataclasses.replace(endpoint, **parts)

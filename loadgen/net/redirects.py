"""A base URL that redirects: the place is looked up once, before anything is sent under load.

A redirect costs a request of its own each time, and a POST may lose its body in one, so the load goes straight
to the final URL. A redirect within the load stays an ``http_error``.
"""

from __future__ import annotations

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
    """``endpoint``, or the one that its /models redirects to; what does not answer is left to the probe.

    Raises EndpointError where the redirect cannot be followed.
    """
    try:
        page = await pages.get(endpoint.models_url, endpoint.all_headers(), LOOK_TIMEOUT_S)
    except (TimeoutError, PageError):
        return endpoint
    location = page.headers.get("location") if page.status in _STATUSES else None
    return endpoint if location is None else moved(endpoint, location)


def moved(endpoint: Endpoint, location: str) -> Endpoint:
    """The endpoint whose /models is at ``location``, with the same key and headers.

    Raises EndpointError where that is no base URL, where a secret stands in it, or where secrets would go to another
    server: another host or port (but for http to https on their own ports), or from https to http.
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
            f"{shown}: the key or the value of a --header stands in it; give the final base URL"
        )
    here, there = (endpoint.scheme, endpoint.port), (found.scheme, found.port)
    same = found.host == endpoint.host and (
        here == there or (here, there) == (("http", 80), ("https", 443))
    )
    if not same and (endpoint.api_key or endpoint.headers):
        raise EndpointError(
            f"{shown}: the API key and --header are not sent to another server; give that URL"
        )
    return dataclasses.replace(
        found, query=endpoint.query, api_key=endpoint.api_key, headers=endpoint.headers
    )

"""Where a base URL that redirects leads to, and what is not sent there."""

import dataclasses

import pytest

from ampacity.loadgen.net.pages import Pages
from ampacity.loadgen.net.redirects import final_endpoint, moved
from ampacity.loadgen.send.endpoint import Endpoint, EndpointError, parse_endpoint
from ampacity.loadgen.send.keys import Keys
from tests.support.servers.fault_server import FaultServer
from tests.support.stage_driving import on_loop

KEY = "sk-very-secret-42"


def followed(endpoint: Endpoint) -> Endpoint:
    async def main() -> Endpoint:
        async with Pages() as pages:
            return await final_endpoint(pages, endpoint)

    return on_loop("uvloop", main())


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary", "308 Permanent"])
def test_a_redirect_is_followed_to_the_base_url(status: str) -> None:
    with FaultServer(pages={"/v1/models": (status, "/serving/v1/models")}) as server:
        endpoint = parse_endpoint(server.url)
        found = followed(endpoint)
    assert found.url == server.url.replace("/v1", "/serving/v1")
    assert (found.port, found.path) == (endpoint.port, "/serving/v1")


def test_what_does_not_redirect_stays() -> None:
    with FaultServer() as server:
        endpoint = parse_endpoint(server.url)
        assert followed(endpoint) == endpoint
    assert followed(endpoint) == endpoint  # nobody there: the probe says so


@pytest.fixture(autouse=True)
def a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", KEY)


def keyed(url: str) -> Endpoint:
    return parse_endpoint(url, keys=Keys("api_key_env", "A_KEY"))


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("http://a.test/v1", "https://a.test/v1/models"),
        ("http://a.test:8000/v1", "/v2/models"),
        ("https://a.test/v1", "https://a.test/other/v1/models/"),
    ],
)
def test_the_key_goes_along_on_the_same_server(url: str, location: str) -> None:
    assert KEY in moved(keyed(url), location).secrets


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("https://a.test/v1", "https://b.test/v1/models"),
        ("https://a.test/v1", "//b.test/v1/models"),
        ("https://a.test/v1", "http://a.test/v1/models"),
        ("http://a.test/v1", "http://a.test:8080/v1/models"),
        ("http://a.test:8000/v1", "https://a.test:8443/v1/models"),
    ],
)
def test_the_key_never_goes_to_another_server(url: str, location: str) -> None:
    with pytest.raises(EndpointError, match="not sent to another server") as caught:
        moved(keyed(url), location)
    assert KEY not in str(caught.value)
    header = dataclasses.replace(parse_endpoint(url), headers=(("X-Token", KEY),))
    with pytest.raises(EndpointError, match="not sent to another server"):
        moved(header, location)
    assert not moved(parse_endpoint(url), location).secrets  # without secrets: gladly


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        (f"http://b.test/x?key={KEY}", "redirects to http://b.test/x: that is no base URL"),
        (f"http://u:{KEY}@a.test/v1/models", "redirects to http://a.test/v1/models: "),
        (
            f"/{KEY}/v1/models",
            r"redirects to http://a.test/\*\*\*/v1/models: the path's part 1 holds",
        ),
        (
            f"ftp://a.test/{KEY}/models",
            r"redirects to ftp://a.test/\*\*\*/models: ftp://a.test/\*\*\*: the URL",
        ),
    ],
)
def test_a_secret_in_the_location_is_neither_shown_nor_used(location: str, shown: str) -> None:
    with pytest.raises(EndpointError, match=shown) as caught:
        moved(keyed("http://a.test/v1"), location)
    assert KEY not in str(caught.value)


def test_what_the_given_url_says_is_no_secret() -> None:
    tenant = dataclasses.replace(
        parse_endpoint("http://a.test/acme/v1"), headers=(("X-Tenant", "acme"),)
    )
    assert moved(tenant, "/acme/serving/v1/models").url == "http://a.test/acme/serving/v1"


@pytest.mark.parametrize(
    "location", ["https://a.test/login", "ftp://a.test/v1/models", "http://u:p@a.test/v1/models"]
)
def test_a_redirect_to_something_else_is_one_line(location: str) -> None:
    with pytest.raises(EndpointError, match="redirects to"):
        moved(parse_endpoint("http://a.test/v1"), location)

"""What is secret in the values of headers, and what is ordinary text."""

from base64 import b64encode

import pytest

from ampacity.loadgen.send.endpoint import parse_endpoint
from ampacity.loadgen.send.secrets import redact

BASIC = f"Basic {b64encode(b'svc:hunter2hunter2').decode()}"
COOKIE = "sid=S1a9S1b8S1c7S1d6; csrf=T2a9T2b8T2c7T2d6; session_id2=xkqzjvwpabcdefgh; theme=dark"


@pytest.mark.parametrize(
    ("value", "said", "shown"),
    [
        (BASIC, "password hunter2hunter2 of svc is wrong", "password *** of svc is wrong"),
        (BASIC, "no svc:hunter2hunter2", "no ***"),
        (BASIC, "no aHVudGVyMmh1bnRlcjI=", "no ***"),  # Base64 of the password alone
        (COOKIE, "session S1a9S1b8S1c7S1d6 has expired", "session *** has expired"),
        (COOKIE, "no T2a9T2b8T2c7T2d6, xkqzjvwpabcdefgh", "no ***, ***"),
        (COOKIE, "no session_id2 or theme", "no session_id2 or theme"),  # names
        ("svc:hunter2hunter2", "no hunter2hunter2", "no ***"),
        ("gold,hunter2hunter2", "no hunter2hunter2", "no ***"),
        ("s%3AS1a9S1b8S1c7S1d6.abcDEF012gh", "no S1a9S1b8S1c7S1d6", "no ***"),
        ("Bearer eyJhIjoxfQ.aB3dE5gH7j.Zx9Yw8Vu7TZx9Yw8Vu7T", "no aB3dE5gH7j", "no ***"),
    ],
)
def test_each_part_of_a_value_is_a_secret(value: str, said: str, shown: str) -> None:
    endpoint = parse_endpoint("http://h/v1", headers=(("X-It", value),))
    assert redact(said, endpoint.secrets) == shown


@pytest.mark.parametrize(
    "value",
    [
        "application/json; charset=utf-8, text/event-stream",
        "tools-2024-04-04,prompt-caching-2024-07-31",
        "team=platform-1, region=europe-west4, until=31536000",
        "https://gpu-node7.example.com:8000/v1, 127.0.0.1",
        f"Basic {b64encode(b'admin:admin').decode()}",
        f"Basic {b64encode(b'user:').decode()}",
    ],
)
def test_ordinary_text_is_not_eaten(value: str) -> None:
    """Words, dates, numbers and hosts within a value may stand in any message."""
    said = (
        "admin of platform-1: application/json expected, not text/event-stream, prompt-caching "
        "or europe-west4; user: gpt-4-turbo-2024-04-09 at gpu-node7.example.com, 127.0.0.1, limit 31536000"
    )
    endpoint = parse_endpoint("http://h/v1", headers=(("X-It", value),))
    assert redact(said, endpoint.secrets) == said

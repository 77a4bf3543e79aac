"""Keys and the shapes of providers, on real sockets."""

import asyncio
import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ampacity.config import make_settings
from ampacity.loadgen.drive.account import Account
from ampacity.loadgen.drive.options import RunnerOptions
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.plan import StagePlan
from ampacity.loadgen.probe.ask import ask
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import Endpoint, EndpointError, parse_endpoint
from ampacity.loadgen.send.keys import Keys
from ampacity.loadgen.send.protocols import RequestShape
from ampacity.loadgen.send.requests import RequestMaker
from ampacity.values import ConfigError
from ampacity.workloads.prompts.synthetic import PromptMaker
from ampacity.workloads.prompts.tokenizers import WORDS
from tests.support.servers.fault_server import FaultServer
from tests.support.servers.hosted import Provider
from tests.support.stage_driving import played, requests_to, schedule_at

KEY = "sk-PLANTED-4711-abcdef"


@pytest.fixture(autouse=True)
def a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", KEY)


BEARER = {"authorization": f"Bearer {KEY}"}
AZURE = "my.openai.azure.com/openai/deployments/gpt"
CHAT = "/chat/completions"
SHAPES: list[tuple[str, dict[str, str], str, dict[str, str]]] = [
    # base URL without scheme; options; the path that is asked; the headers of the key
    ("api.openai.com/v1", {}, f"/v1{CHAT}", BEARER),
    ("api.openai.com/v1", {"api": "responses"}, "/v1/responses", BEARER),
    (f"{AZURE}?api-version=2024-10-21", {}, f"/openai/deployments/gpt{CHAT}?api-version=2024-10-21",
     {"api-key": KEY}),
    (f"{AZURE}{CHAT}?api-version=1", {}, f"/openai/deployments/gpt{CHAT}?api-version=1",
     {"api-key": KEY}),
    ("my.openai.azure.com/openai/v1", {}, f"/openai/v1{CHAT}", {"api-key": KEY}),
    ("gateway.test/azure/openai/deployments/gpt?api-version=1", {},
     f"/azure/openai/deployments/gpt{CHAT}?api-version=1", {"api-key": KEY}),
    ("api.anthropic.com/v1", {"api": "messages"}, "/v1/messages",
     {"x-api-key": KEY, "anthropic-version": "2023-06-01"}),
    ("vllm.test/v1", {"api": "messages"}, "/v1/messages", {"x-api-key": KEY, **BEARER}),
    ("bedrock-runtime.us-west-2.amazonaws.com/openai/v1", {}, f"/openai/v1{CHAT}", BEARER),
    ("bedrock-gateway.test/api/v1", {}, f"/api/v1{CHAT}", BEARER),
    ("api.together.xyz/v1", {}, f"/v1{CHAT}", BEARER),
    ("api.fireworks.ai/inference/v1", {}, f"/inference/v1{CHAT}", BEARER),
    ("api.groq.com/openai/v1", {}, f"/openai/v1{CHAT}", BEARER),
    ("openrouter.ai/api/v1", {}, f"/api/v1{CHAT}", BEARER),
    ("litellm.test:4000", {}, CHAT, BEARER),
    ("my.azure-api.net/llm", {"api_key_header": "Ocp-Apim-Subscription-Key"}, f"/llm{CHAT}",
     {"ocp-apim-subscription-key": KEY}),
    ("manager.test/v1", {"api_key_header": "Authorization: Api-Key", "path": "/custom/answer"},
     "/v1/custom/answer", {"authorization": f"Api-Key {KEY}"}),
]  # fmt: skip


@pytest.mark.parametrize(("base", "options", "path", "headers"), SHAPES, ids=lambda v: str(v)[:60])
def test_the_shape_of_each_provider(
    base: str, options: dict[str, str], path: str, headers: dict[str, str]
) -> None:
    """The address is this machine's, the name and the path are the provider's."""

    async def main(port: int) -> RequestRecord:
        host, _, rest = base.partition("/")
        url = f"http://{host.partition(':')[0]}:{port}/{rest}"
        settings = make_settings({"url": url, "api_key_env": "A_KEY", **options})
        client = Client(settings.endpoint, ["127.0.0.1"], None)
        maker = RequestMaker(settings.endpoint, PromptMaker(WORDS, "salt"), "probe")
        shape = RequestShape(settings.api, "m")
        record = await ask(client, shape.api, maker.numbered(shape, 8, 2))
        await client.close()
        return record

    with FaultServer() as server:
        assert asyncio.run(main(server.port)).http_status == 200
        (request,) = server.requests
    assert request.path == path
    assert headers.items() <= request.headers.items()
    held = {name for name, value in request.headers.items() if KEY in value}
    assert held == {name for name, value in headers.items() if KEY in value}


def command_of(tmp_path: Path, printed: Callable[[int], str]) -> str:
    """Return a command that prints ``printed(n)`` at its n-th call, at most nine times."""
    for n in range(9):
        (tmp_path / f"{n}.key").write_text(printed(n))
    count = tmp_path / "count"
    count.write_text("0")
    return f"n=$(cat {count}); echo $((n+1)) > {count}; cat {tmp_path}/$n.key"


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\nsk-second\n\n")
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(EndpointError, match=f"mode {mode:04o}") as refused:
            Keys("api_key_file", str(path))
        assert KEY not in str(refused.value)
    path.chmod(0o600)
    assert Keys("api_key_file", str(path)).current == (KEY, "sk-second")


@pytest.mark.parametrize(
    ("printed", "life_s"),
    [
        (f"{KEY}\n", None),
        (json.dumps({"token": KEY, "expires_in": 3600}), 3600),
        (json.dumps({"access_token": KEY, "expires_on": "IN 900 s"}), 900),
        (
            json.dumps({"status": {"token": KEY, "expirationTimestamp": "2199-01-01T00:00:00Z"}}),
            1e9,
        ),
    ],
)
def test_what_a_command_prints(printed: str, life_s: float | None, tmp_path: Path) -> None:
    printed = printed.replace("IN 900 s", str(time.time() + 900))
    keys = Keys("api_key_command", command_of(tmp_path, lambda n: printed))
    assert keys.current == (KEY,)
    left_s = keys._due_s - time.monotonic()
    if life_s is None:
        assert left_s == float("inf")
    elif life_s < 1e9:
        assert left_s == pytest.approx(life_s - 60, abs=5)  # a minute before the expiry
    assert KEY not in repr(keys)
    assert pickle.loads(pickle.dumps(keys)).current == (KEY,)  # it goes to the workers


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("exit 3", "status 3"),
        ("echo", "there is no key"),
        ("echo '{\"x\": 1}'", "its JSON needs one of key"),
        ('echo \'{"key": "k-1", "expires_at": "soon"}\'', "ISO 8601"),
        ('echo \'{"key": "k-1", "expires_in": null}\'', "ISO 8601"),
        ("echo a key", "holds a space"),
        ("echo '<html>'", "no key but HTML"),
        ("echo '[1]'", "no key but HTML, JSON"),
        ("printf %9000s | tr ' ' a", "over 8000 characters"),
    ],
)
def test_a_command_without_a_key(command: str, message: str) -> None:
    with pytest.raises(EndpointError, match=message):
        Keys("api_key_command", command)


def test_a_key_that_has_expired_already_is_not_asked_for_all_the_time(tmp_path: Path) -> None:
    printed = json.dumps({"key": KEY, "expires_in": -5})
    assert not Keys("api_key_command", command_of(tmp_path, lambda n: printed)).due()


def test_one_source_of_keys() -> None:
    given = {"url": "http://h/v1", "api_key_env": "A_KEY", "api_key_command": "echo k"}
    with pytest.raises(ConfigError, match="one of --api-key-env and --api-key-command"):
        make_settings(given)
    with pytest.raises(EndpointError, match="--path v1"):
        parse_endpoint("http://h", route="v1")


def driven(provider: Provider, keys: Keys, times_s: list[float]) -> list[RequestRecord]:
    """Send requests at these times with the keys, and return their records."""

    async def main(endpoint: Endpoint) -> list[RequestRecord]:
        made = requests_to(endpoint)
        client = Client(endpoint, endpoint.addresses(), None)
        options = RunnerOptions(account=Account(keys), secrets=lambda: endpoint.secrets)
        plan = StagePlan(0, "open", schedule_at(times_s), times_s[-1], offered_rps=1.0)
        found = (await played(client, made, plan, options)).records
        return sorted(found, key=lambda r: r.request_id)

    with provider:
        return asyncio.run(main(parse_endpoint(provider.url, keys=keys)))


def test_no_run_waits_for_a_command_that_hangs(tmp_path: Path) -> None:
    printed = json.dumps({"key": KEY, "expires_in": 0.2})
    flag = tmp_path / "called"
    keys = Keys(
        "api_key_command", f"[ -e {flag} ] && exec sleep 30; touch {flag}; echo '{printed}'"
    )
    began_s = time.monotonic()
    records = driven(Provider(keys=[KEY]), keys, [0.1 * i for i in range(16)])
    assert [r.status for r in records] == ["ok"] * 16
    assert not keys.due()  # it is being renewed
    assert time.monotonic() - began_s < 20


def test_several_keys_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "sk-one, sk-two,sk-three")
    provider = Provider(keys=["sk-one", "sk-two", "sk-three"])
    records = driven(provider, Keys("api_key_env", "A_KEY"), [0.01 * i for i in range(9)])
    assert {r.status for r in records} == {"ok"}
    assert set(provider.keys_used.values()) == {3}


def test_a_key_that_expires_is_renewed_before_it_does(tmp_path: Path) -> None:
    """The provider's keys live for 0.6 s; the command says so, and no request is refused."""
    provider = Provider(keys=[f"sk-number-{n}" for n in range(9)])
    said = {"expires_in": 0.6}
    command = command_of(tmp_path, lambda n: json.dumps({"key": f"sk-number-{n}", **said}))
    records = driven(provider, Keys("api_key_command", command), [0.05 * i for i in range(36)])
    assert {r.status for r in records} == {"ok"}
    assert len(provider.keys_used) >= 3


def test_a_401_renews_the_key_and_what_the_server_repeats_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that were built ahead with the old key are sent with the new one."""
    monkeypatch.setattr("ampacity.loadgen.send.keys.RENEW_EVERY_S", 0.2)
    provider = Provider(keys=["sk-planted-1", "sk-planted-2"], key_life_s=1e9)
    provider.issue("sk-planted-2")
    provider._until_s["sk-planted-0"] = time.monotonic() + 1.0
    keys = Keys("api_key_command", command_of(tmp_path, lambda n: f"sk-planted-{n}"))
    records = driven(provider, keys, [0.05 * i for i in range(50)])
    refused = [r for r in records if r.http_status == 401]
    assert {r.status for r in records if r not in refused} == {"ok"}
    assert 1 <= len(refused) <= 6  # until the new key was there
    assert "bad or expired key ***" in (refused[0].error or "")
    assert records[-1].status == "ok"
    assert provider.keys_used.keys() == {"sk-planted-0", "sk-planted-1"}


def test_a_key_that_cannot_be_renewed_is_kept_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o600)
    keys = Keys("api_key_file", str(path))
    path.unlink()
    keys.refused(time.monotonic_ns())
    assert not keys.due()  # it was read only just now
    keys._read_ns -= 10**10
    assert keys.due()
    assert not keys.due()  # once
    keys.renew()
    assert keys.current == (KEY,)
    ((why, tried_ns),) = keys.failures.items()
    assert why == f"--api-key-file {path}: cannot be read: No such file or directory"
    assert 0 < keys._read_ns - tried_ns < 10**9
    keys._read_ns -= 10**10
    assert keys.due()
    keys.renew()
    assert keys.failures == {why: tried_ns}  # of the first time


def test_a_command_that_hangs_is_a_failure_once_requests_are_refused() -> None:
    keys = Keys("api_key_command", f"echo {KEY}")
    keys._read_ns -= 10**10
    keys.refused(time.monotonic_ns())
    assert keys.due()  # and nothing comes
    keys.refused(time.monotonic_ns())
    assert not keys.failures  # within a second
    keys._tried_ns -= 2 * 10**9
    keys.refused(time.monotonic_ns())
    assert list(keys.failures) == ["--api-key-command: no new key came, and requests were refused"]

"""API keys: read from a variable, a file or a command, used in turn, renewed during a run."""

import atexit
import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from math import inf
from typing import Any

from ampacity.files import MIB, read_bytes
from ampacity.loadgen.send.secrets import KNOWN

COMMAND_MAX_S = 60.0
KEY_MAX = 8000  # characters: servers refuse longer header lines
AHEAD_S, AHEAD_SHARE = 60.0, 0.2  # renewed that long before the expiry, or in that share of a life
LATE_NS = 10**9  # so long a new key may take
RENEW_EVERY_S = 5.0  # at most, however often a key is refused
_TOKENS = ("key", "api_key", "apiKey", "token", "access_token", "accessToken", "id_token")
_EXPIRIES = ("expires_at", "expires_on", "expiry", "expiration", "expirationTimestamp")
_INNER = ("status", "credential")  # Kubernetes' ExecCredential, gcloud's config-helper


class EndpointError(ValueError):
    """An unusable endpoint; the message is one line with cause and remedy."""


def _of_variable(name: str) -> str:
    if not (text := os.environ.get(name)):
        if re.fullmatch("[A-Z_][A-Z0-9_]*", name):
            wrong = f" {name}: that environment variable is not set or empty"
        else:  # perhaps the key itself: not shown
            wrong = ": no environment variable of that name is set: give a variable's name, "
            wrong += "not the key"
        raise EndpointError(f"--api-key-env{wrong}")
    return text


def _of_file(path: str) -> str:
    try:
        return read_bytes(path, MIB, private=True).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not a text file"
        raise EndpointError(f"--api-key-file {path}: cannot be read: {why}") from None


def _of_command(command: str) -> str:
    # a group of its own, so that what the command starts ends with it
    with subprocess.Popen(
        command,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,
    ) as running:
        assert running.stdout is not None
        _RUNNING.add(running.pid)
        too_late = threading.Timer(COMMAND_MAX_S, _kill, [running.pid])
        too_late.daemon = True
        too_late.start()
        try:
            printed = running.stdout.read(MIB)
            running.stdout.close()
            status = running.wait()
        finally:
            timed_out = too_late.finished.is_set()
            too_late.cancel()
            _kill(running.pid)
            _RUNNING.discard(running.pid)
    if timed_out:
        raise EndpointError(f"--api-key-command: the command took more than {COMMAND_MAX_S:g} s")
    if len(printed) == MIB:
        raise EndpointError("--api-key-command: the command prints more than a key: over 1 MiB")
    if status:
        raise EndpointError(
            f"--api-key-command: the command ended with status {status}: run it by hand to see why"
        )
    return printed.decode("utf-8", "replace")


_RUNNING: set[int] = set()  # groups of commands, by their leaders


def _kill(group: int) -> None:
    with contextlib.suppress(OSError):  # it has ended
        os.killpg(group, signal.SIGKILL)


@atexit.register
def _kill_all() -> None:
    for group in list(_RUNNING):
        _kill(group)


_READERS: dict[str, Callable[[str], str]] = {
    "api_key_env": _of_variable,
    "api_key_file": _of_file,
    "api_key_command": _of_command,
}


class Keys:
    """The keys of an endpoint. Those of a file or a command are read again when ``due``."""

    def __init__(self, source: str, name: str) -> None:
        """Read the keys of ``name``; ``source``: the setting that names it. Raises EndpointError."""
        self._source, self._name = source, name
        self.known: dict[str, None] = {}  # every key so far, never to be written to disk
        self._failures: dict[str, int] = {}
        self._replaced: dict[bytes, bytes] = {}  # ends of header lines, from old keys to new ones
        self._renewing, self._tried_ns, self._refused_ns = False, 0, 0
        self._read()

    @property
    def option(self) -> str:
        """Return the option that names the keys."""
        return f"--{self._source.replace('_', '-')}"

    @property
    def failures(self) -> dict[str, int]:
        """Return {why the keys could not be renewed: when that was first tried, monotonic ns}."""
        late = self._renewing and self._refused_ns > self._tried_ns + LATE_NS
        waits = {f"{self.option}: no new key came, and requests were refused": self._tried_ns}
        return self._failures | (waits if late else {})

    def put_into(self, request: bytes) -> bytes:
        """Return a request that was built with an earlier key with the present one."""
        for old, new in self._replaced.items():
            request = request.replace(old, new)
        return request

    def refused(self, started_ns: int) -> None:
        """Note that a request was refused with 401 that began at ``started_ns`` (monotonic)."""
        if self._source != "api_key_env" and started_ns > self._read_ns:
            self._due_s, self._refused_ns = 0.0, time.monotonic_ns()

    def due(self) -> bool:
        """Return whether ``renew`` must be called now; then False until that is over."""
        now_s, again_s = time.monotonic(), self._read_ns / 1e9 + RENEW_EVERY_S
        if self._renewing or now_s < self._due_s or (self._due_s == 0.0 and now_s < again_s):
            return False
        self._renewing, self._tried_ns = True, time.monotonic_ns()
        return True

    def renew(self) -> None:
        """Read the keys again; may take as long as the command does."""
        try:
            self._read()
        except EndpointError as error:
            self._failures.setdefault(str(error), self._tried_ns)
            self._read_ns, self._due_s = time.monotonic_ns(), 0.0
        finally:
            self._renewing = False

    def _read(self) -> None:
        text, expires_s = _READERS[self._source](self._name), inf
        if self._source == "api_key_command" and text.lstrip().startswith("{"):
            text, expires_s = _key_and_expiry(text)
        shown = "" if self._source == "api_key_command" else f" {self._name}"
        found = _split(text, f"{self.option}{shown}")
        self.known |= dict.fromkeys(found)
        KNOWN.update(found)
        old = [key for key in self.known if key not in found]
        self._replaced = {
            f" {key}\r\n".encode(): f" {found[i % len(found)]}\r\n".encode()
            for i, key in enumerate(old)
        }
        self.current, self._read_ns = found, time.monotonic_ns()
        life_s = expires_s - time.time()
        ahead_s = min(AHEAD_S, AHEAD_SHARE * life_s)
        self._due_s = time.monotonic() + life_s - ahead_s if life_s > 0 else 0.0


def _split(text: str, where: str) -> tuple[str, ...]:
    """Return the keys of a text, separated by commas or line ends."""
    found = tuple(dict.fromkeys(filter(None, map(str.strip, re.split("[,\n]", text)))))
    if not found:
        raise EndpointError(f"{where}: there is no key")
    if not all(re.fullmatch("[!-~]+", key) for key in found):
        raise EndpointError(f"{where}: the key holds a space, line end or non-ASCII character")
    if any(key[0] in "<[{" or len(key) > KEY_MAX for key in found):
        raise EndpointError(f"{where}: this is no key but HTML, JSON, or over {KEY_MAX} characters")
    return found


def _key_and_expiry(text: str) -> tuple[str, float]:
    """Return the key and its expiry (s since 1970; inf: none) that a command prints as JSON."""
    try:
        held: Any = json.loads(text)
        held |= next((held[name] for name in _INNER if isinstance(held.get(name), dict)), {})
        key = next(held[name] for name in _TOKENS if isinstance(held.get(name), str))
        return key, _expiry_s(held)
    except (ValueError, TypeError, OverflowError, RecursionError, StopIteration):
        raise EndpointError(
            f"--api-key-command: its JSON needs one of {', '.join(_TOKENS)}, and may have "
            f"expires_in (s) or one of {', '.join(_EXPIRIES)} (s since 1970 or ISO 8601)"
        ) from None


def _expiry_s(held: Mapping[str, Any]) -> float:
    if "expires_in" in held:
        return time.time() + float(held["expires_in"])
    value: Any = next((held[name] for name in _EXPIRIES if held.get(name)), inf)
    try:
        return float(value)
    except ValueError:
        due = datetime.fromisoformat(value)
        return due.replace(tzinfo=due.tzinfo or UTC).timestamp()

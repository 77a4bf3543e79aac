"""The account at a provider: its keys, which are renewed, and what the requests cost."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pyarrow as pa

from ampacity.loadgen.plan import FAILED_MIN, Live
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.keys import Keys

MILLION = 1e6
KNOWN_MIN = FAILED_MIN  # ended requests whose costs say what those in flight will cost
UNBILLED = ("connect_error", "shed", "http_error", "too_long")


class Account:
    """Counts what requests cost, and tells by ``used_up`` why no more may be sent. Dollars.

    A request in flight counts with its planned tokens, times what those before it cost over what
    was planned. So the spend exceeds the limit by what is in flight at worst.
    """

    def __init__(
        self,
        keys: Keys | None = None,
        prices: tuple[float, float, float] | None = None,
        limit_usd: float | None = None,
        limits: Mapping[str, int | None] | None = None,
    ) -> None:
        """``prices``: of input, cached input and output, dollars per million tokens.

        ``limits``: of what is sent, every attempt, and planned: requests and tokens.
        """
        self._keys, self._prices, self.limit_usd = keys, prices, limit_usd
        self._limits = {name: most for name, most in (limits or {}).items() if most}
        self._sent = dict.fromkeys(self._limits, 0)
        self.used_up: str | None = None
        self._spent_usd = self._planned_usd = self._in_flight_usd = 0.0
        self._ended = 0

    def unspent(self) -> Account:
        """Return an account with the same keys, prices and limit of which nothing is spent."""
        return Account(self._keys, self._prices, self.limit_usd, self._limits)

    def sending(self, exchange: Exchange) -> None:
        """Put the present key into a request that is about to be sent, and count it."""
        if self._keys is not None:
            exchange.request = self._keys.put_into(exchange.request)
        self._count(exchange.record)
        if self._prices is not None:
            self._in_flight_usd += self._plan(exchange.record)
            self._check()

    def ended(self, record: RequestRecord, live: Live | None = None) -> None:
        """Count what a request has cost, also in ``live``; after a 401 renew the key."""
        if record.http_status == 401 and self._keys is not None:
            self._keys.refused(record.started_ns or 0)
        if self._prices is None:
            return
        cost_usd = self._cost(record)
        if record.status != "shed":
            self._in_flight_usd -= self._plan(record)
        if cost_usd:
            self._ended += 1
            self._planned_usd += self._plan(record) or cost_usd
        self._spent_usd += cost_usd
        self._check()
        if live is not None:
            live.spent_usd = self._spent_usd

    def spent_before(self, requests: pa.Table) -> None:
        """Count what the requests of a run have cost that now goes on."""
        if self._prices is None and not self._limits:
            return
        for row in requests.drop_columns(["class"]).to_pylist():
            record = RequestRecord(**row)
            self._count(record)
            if self._prices is not None:
                self._spent_usd += self._cost(record)
        self._check()

    def look(self, live: Live, max_errors: float | None) -> None:
        """Renew the keys in a thread if they are due; end the run if too many requests fail."""
        if self._keys is not None:
            live.key_failures = self._keys.failures
            if self._keys.due():
                # a daemon: neither the loop's end nor the process's waits for a command that hangs
                threading.Thread(target=self._keys.renew, daemon=True).start()
        if max_errors is None or live.judged < FAILED_MIN or self.used_up:
            return
        if live.failed > max_errors * live.judged:
            failed = f"{live.failed} of {live.judged} requests failed"
            self.used_up = f"--max-errors {100 * max_errors:g}%: {failed}"

    def _count(self, record: RequestRecord) -> None:
        """Count an attempt as sent."""
        planned = (record.input_tokens_planned or 0) + (record.output_tokens_planned or 0)
        for name, most in self._limits.items():
            self._sent[name] += planned if name == "tokens" else 1
            if self._sent[name] >= most:
                self.used_up = self.used_up or f"--max-{name} {most} is used up"

    def _check(self) -> None:
        usual = self._spent_usd / self._planned_usd if self._ended >= KNOWN_MIN else 1.0
        limit = self.limit_usd
        if limit is not None and self._spent_usd + usual * self._in_flight_usd >= limit:
            self.used_up = self.used_up or f"--max-cost {limit:g} is used up"

    def _plan(self, record: RequestRecord) -> float:
        return self._usd(record.input_tokens_planned, 0, record.output_tokens_planned)

    def _cost(self, record: RequestRecord) -> float:
        """Return the cost of a request; of one that broke off, of its prompt and what came of it."""
        if record.status in UNBILLED or record.started_ns is None:
            return 0.0
        prompt, output = record.input_tokens, record.output_tokens
        cached, chunks = record.cached_tokens, len(record.chunk_at_us)
        if output is None or (output < chunks and record.chunk_tokens is None):
            output = chunks
            if record.output_tokens is not None:  # which cannot be true: nor need the others be
                prompt = cached = None
        return self._usd(record.input_tokens_planned if prompt is None else prompt, cached, output)

    def _usd(self, prompt: int | None, cached: int | None, output: int | None) -> float:
        assert self._prices is not None
        of_input, of_cached, of_output = self._prices
        held = min(cached or 0, prompt or 0)
        usd = ((prompt or 0) - held) * of_input + held * of_cached + (output or 0) * of_output
        return usd / MILLION

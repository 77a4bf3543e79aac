"""The settings that each process of a run needs to send its requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ampacity.loadgen.drive.account import Account
from ampacity.loadgen.drive.in_flight import Note
from ampacity.loadgen.drive.options import RunnerOptions
from ampacity.loadgen.drive.stage import StageRunner
from ampacity.loadgen.net.http import Client, Reuse, Stamps
from ampacity.loadgen.plan import Limits
from ampacity.loadgen.probe.results import Calibration
from ampacity.loadgen.receive.answers import ANSWERS
from ampacity.loadgen.receive.kept_answers import KeptAnswers
from ampacity.loadgen.rundir.write import StreamWriter
from ampacity.loadgen.send.endpoint import Endpoint, Proxy
from ampacity.loadgen.send.protocols import RequestShape
from ampacity.loadgen.send.requests import ScheduledRequests
from ampacity.loadgen.send.secrets import told_by
from ampacity.workloads.classes import RequestClass
from ampacity.workloads.prompts.files import PromptFile
from ampacity.workloads.prompts.images import Images
from ampacity.workloads.prompts.tokenizers import load_tokenizer
from ampacity.workloads.traces.recorded import Recorded


@dataclass(frozen=True)
class Route:
    """One endpoint with its addresses and proxy."""

    endpoint: Endpoint
    addresses: list[str]
    proxy: Proxy | None = None

    def client(self, stamps: Stamps, reuse: Reuse) -> Client:
        """Return a client to it; needs a running event loop."""
        where = self.endpoint, self.addresses, self.endpoint.ssl_context()
        return Client(*where, stamps=stamps, reuse=reuse, proxy=self.proxy)


@dataclass(frozen=True)
class Setup:
    """Facts that each process of a run needs to send its requests. Has secrets: never written to disk."""

    routes: tuple[Route, ...]  # one for each endpoint, used round-robin
    shape: RequestShape
    tokenizer: str
    salt: str
    calibration: Calibration
    run_id: str
    limits: Limits
    account: Account
    stamps: Stamps
    reuse: Reuse
    classes: tuple[RequestClass, ...] = ()
    planned_histories: bool = False  # text of planned length in place of the answers of a session
    texts: PromptFile | Recorded | None = None  # of a file of prompts, or the messages of a trace
    images: Images | None = None
    answers_in: Path | None = None  # folder for the texts of answers
    answers_bytes: int = 0  # limit of each process
    counts_tokens: bool = False  # the tokenizer counts what the server does not
    timed: bool = False  # histograms of the requests' times, where they are shown
    thinks_until: str | None = None  # closing tag of thinking that has no opening tag

    def clients(self) -> list[Client]:
        """Return a client for each endpoint; needs a running event loop."""
        return [route.client(self.stamps, self.reuse) for route in self.routes]

    @property
    def secrets(self) -> tuple[str, ...]:
        """Return the strings to redact, longest first."""
        found = {secret for route in self.routes for secret in route.endpoint.secrets}
        found |= {part for c in self.classes for _, value in c.headers for part in told_by(value)}
        return tuple(sorted(found, key=len, reverse=True))

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the names of the endpoints in the records: host:port."""
        return tuple(f"{route.endpoint.host}:{route.endpoint.port}" for route in self.routes)

    def runner(
        self, clients: Sequence[Client], stream: StreamWriter, worker: int = 0
    ) -> StageRunner:
        """Return a stage runner that sends this run's requests."""

        def flush(in_flight: Note | None) -> str | None:
            stream.flush()
            if in_flight is not None:
                stream.note(*in_flight)
            return stream.failed

        tokenizer = load_tokenizer(self.tokenizer)
        prompts = self.calibration.prompts(tokenizer, self.salt)
        requests = ScheduledRequests(
            [(route.endpoint, route.proxy) for route in self.routes],
            self.shape,
            prompts,
            self.run_id,
            classes=self.classes,
            planned_histories=self.planned_histories,
            images=self.images,
            file=self.texts,
        )
        known = self.secrets  # which grow where keys are renewed
        secrets = (lambda: self.secrets) if self.routes[0].endpoint.keys else (lambda: known)
        keep = None
        if self.answers_in is not None:
            path = self.answers_in / f"answers-{worker}.jsonl"
            asked = self.texts is not None
            keep = KeptAnswers(
                path, self.answers_bytes, prompts=asked, secrets=secrets, later=stream.later
            ).keep
        return StageRunner(
            clients,
            requests,
            stream.append,
            RunnerOptions(
                limits=self.limits,
                targets=self.targets,
                secrets=secrets,
                account=self.account,
                worker=worker,
                timed=self.timed,
                flush=flush,
                answer=partial(ANSWERS[self.shape.api], self.thinks_until),
                keep=keep,
                by_piece=tokenizer.by_piece if self.counts_tokens else None,
            ),
        )

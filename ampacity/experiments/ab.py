"""A/B: load two endpoints (or one twice) alternately, so that drift affects both equally."""

import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path

from ampacity.experiments.stages.conduct import conduct
from ampacity.experiments.stages.provenance import out_path
from ampacity.experiments.stages.resume import check_resumable, events_of, is_over
from ampacity.experiments.stages.rig import Rig
from ampacity.live_panel import Outlook
from ampacity.loadgen.rundir.write import RunWriter, take_up
from ampacity.progress import Progress
from ampacity.settings import Settings
from ampacity.values import ConfigError

ORDER = (0, 1, 1, 0)  # of one round
NAMES = ("a", "b")


def arms(a: Settings, b: Settings) -> tuple[Settings, Settings]:
    """Return the settings of both: one load level, a run directory each, different prompt texts.

    Raises ConfigError.
    """
    levels = a.rates or a.concurrency or ()
    if len(levels) != 1:
        raise ConfigError("give one load level: --rates R or --concurrency N")
    out = out_path(a, "ab")
    first, second = (
        replace(s, out=out / name, salt=f"{s.salt}-{name}" if s.salt else None)
        for s, name in zip((a, b), NAMES, strict=True)
    )
    return first, second


async def interleave(rigs: tuple[Rig, Rig], rounds: int, *, aa: bool) -> None:
    """Run A B B A ``rounds`` times. Stage k of both has the same lengths and arrivals.

    If one run ends, so does the other.
    """
    pair = secrets.token_hex(6)
    for rig, name in zip(rigs, NAMES, strict=True):
        rig.note_down("ab", {"pair": pair, "arm": name, "rounds": rounds, "aa": aa})
    order, outlook = ORDER * rounds, Outlook(len(ORDER) * rounds)
    for turn, arm in enumerate(order):
        rig = rigs[arm]
        before = order[:turn].count(1 - arm)
        rig.expect(replace(outlook, arm=NAMES[arm].upper(), before=before))
        rates, concurrency = rig.settings.rates, rig.settings.concurrency
        judged = await (
            rig.open_stage(rates[0]) if rates else rig.closed_stage((concurrency or (1,))[0])
        )
        ended = rig.ended
        if judged is None or ended:
            rigs[1 - arm].ended = ended and (ended[0], f"{NAMES[arm]}: {ended[1]}")
            return


def close_arms(a: Path, b: Path) -> bool:
    """Return whether the load of an A/B is over; one that was killed while it was closed is closed.

    B is closed first: where that was done and A's was not, A ended as B did. Raises RunDirError.
    """
    with take_up(b) as held:
        end = {name: held.run.meta.get(name) for name in ("status", "status_reason", "ended_utc")}
        if not is_over(held.run):
            return False
    with take_up(a) as held:
        if not is_over(held.run):
            check_resumable(held.run)
            if reason := end["status_reason"]:
                by_a = reason.startswith("a: ")
                end["status_reason"] = reason.removeprefix("a: ") if by_a else f"b: {reason}"
            with RunWriter(
                a, {**held.run.meta, **end, "events": events_of(held.run)}, held
            ) as writer:
                writer.finish()
    return True


async def run_ab(
    a: Settings,
    b: Settings,
    rounds: int,
    aa: bool,
    command_line: list[str],
    progress: Progress,
    resume: bool = False,
) -> Path:
    """Open both rigs, interleave their stages, and return the parent of both run directories."""
    if resume and a.out and b.out and close_arms(a.out, b.out):
        return a.out.parent

    async def with_both(first: Rig, second: Rig) -> None:
        for rig in (first, second):
            rig.repeats_left = 0  # or the arms' schedules would diverge
        await interleave((first, second), rounds, aa=aa)

    async def with_first(first: Rig) -> None:
        await open_rig(b, drive=lambda second: with_both(first, second))

    open_rig = partial(
        conduct,
        experiment="ab",
        command_line=command_line,
        progress=progress,
        times=rounds * len(ORDER) // 2,
        resume=resume,
    )
    return (await open_rig(a, drive=with_first)).parent

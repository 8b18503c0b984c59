"""From a stored baseline and a judged run to the next baseline. Pure; all or nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pytest_fastlayer.baselines.reading import BaselineError, shown
from pytest_fastlayer.records import GREEN, NOTICE, CaseRecord, Origin, RunRecord, Verdict

#: Verdicts that ``--fastlayer-accept`` may store: the candidate is right, its figure is worse.
ACCEPTABLE = frozenset(
    {
        Verdict.SLOWER,
        Verdict.BELOW_FLOOR,
        Verdict.MORE_MEMORY,
        Verdict.INCONCLUSIVE,
        Verdict.STALE_BASELINE,
    }
)
#: Verdicts about the *comparison*; once stored, the entry stands on its own.
_ABOUT_COMPARISON = NOTICE | {Verdict.FASTER}


@dataclass(frozen=True)
class Merge:
    """Outcome of merging a run into a baseline. Names are case names, in the run's order.

    ``record`` is what the file shall hold: with anything ``refused``, the old cases alone.
    ``unused`` are stored cases that the run no longer has; they are dropped from ``record``.
    ``older`` are those of the refused that were measured before what is stored.
    """

    record: RunRecord
    new: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    older: tuple[str, ...] = ()

    def summary(self) -> str:
        """``12 new, 1 changed, 0 unchanged, 0 unused, 0 refused``."""
        kinds = ("new", "changed", "unchanged", "unused", "refused")
        return ", ".join(f"{len(getattr(self, kind))} {kind}" for kind in kinds)


def merge(
    old: RunRecord | None,
    run: RunRecord,
    *,
    accept: Collection[str] = frozenset(),
    selected_all: bool,
) -> Merge:
    """Merge a judged run into a baseline, all or nothing.

    Args:
        old: the stored baseline, ``None`` for a first one.
        run: a run whose every case has its verdict.
        accept: names of cases whose worse figure is accepted, or one that was measured before
            the stored one. Incorrect, dishonest and unresolvable cases cannot be accepted.
        selected_all: the run covered every case that exists; only then are stored cases it lacks
            unused. A partial run cannot update a baseline of another provenance.

    A timed entry is never replaced by an untimed one (an accuracy-only run, a case that this
    machine could not finish): it counts as unchanged.

    Raises:
        BaselineError: another device's baseline, a name in ``accept`` that the run does not have,
            or a partial run over a baseline of another provenance.
    """
    unknown = sorted(set(accept) - set(run.cases))
    if unknown:
        raise BaselineError(
            f"accepted but not in this run: {', '.join(map(shown, unknown))}; the run has "
            f"{', '.join(map(shown, list(run.cases)[:20])) or 'no case'}"
        )
    if old is not None and not old.device.matches(run.device):
        raise BaselineError(
            f"the baseline was recorded on {shown(old.device.name)} and this run on "
            f"{shown(run.device.name)} (or its size differs); update a file of its own"
        )
    older = () if old is None else tuple(_older(old, run, accept))
    refused = tuple(
        name
        for name, case in run.cases.items()
        if name in older or not _storable(name, case, accept)
    )
    if refused:
        kept_whole = old or run.model_copy(update={"cases": {}})
        return Merge(kept_whole, refused=refused, older=older)

    stored = {} if old is None else dict(old.cases)
    missing = [name for name in stored if name not in run.cases]
    other_provenance = old is not None and old.provenance != run.provenance
    if old is not None and other_provenance and missing and not selected_all:
        raise BaselineError(
            f"the baseline is {old.provenance} and this run {run.provenance}, and one file must "
            f"not mix the two: run the {len(missing)} other stored cases as well, or update "
            "another file with --fastlayer-baseline"
        )
    names: dict[str, list[str]] = {kind: [] for kind in ("new", "changed", "unchanged", "unused")}
    kept = {} if old is None else {name: _kept(case, old) for name, case in stored.items()}
    cases = {} if selected_all else dict(kept)
    for name, case in run.cases.items():
        entry, before = _entry(case), stored.get(name)
        keeps_figure = before is not None and before.timing is not None and entry.timing is None
        if before is not None and keeps_figure and not other_provenance:
            entry, before = kept[name], kept[name]
        elif before is not None:
            before = before.model_copy(update={"kept_from": None})
        kind = "new" if before is None else "unchanged" if entry == before else "changed"
        names[kind].append(name)
        cases[name] = entry
    names["unused" if selected_all else "unchanged"] += missing

    notes = run.notes
    if old is not None and not selected_all and missing:
        notes = tuple(dict.fromkeys((*old.notes, *run.notes)))
    record = run.model_copy(update={"cases": cases, "notes": notes})
    return Merge(record, **{kind: tuple(found) for kind, found in names.items()})


def _storable(name: str, case: CaseRecord, accept: Collection[str]) -> bool:
    accepted = name in accept and case.verdict in ACCEPTABLE | GREEN
    # Green by the base of its run alone is not enough to replace a stored figure that is better.
    return accepted or (case.verdict in GREEN | NOTICE and not case.is_below_stored)


def _older(old: RunRecord, run: RunRecord, accept: Collection[str]) -> Iterator[str]:
    """Cases whose figure would take the place of another one that was measured after it.

    A published figure has the date of its publication, which says nothing of a measurement's.
    """
    if old.provenance != run.provenance:
        return
    for name, case in run.cases.items():
        before = old.cases.get(name)
        if before is None or before.timing is None or case.timing is None or name in accept:
            continue
        now, then = measured_at(case, run), measured_at(before, old)
        if now and then and now < then and _entry(case).timing != before.timing:
            yield name


def measured_at(case: CaseRecord, record: RunRecord) -> datetime | None:
    """When a case of ``record`` was measured, or None where the record's date is no ISO 8601."""
    try:
        found = datetime.fromisoformat((case.kept_from or record).created)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _kept(case: CaseRecord, old: RunRecord) -> CaseRecord:
    """A stored case that outlives the run it was measured in."""
    last = Origin(created=old.created, commit=old.commit, software=old.software)
    origin = case.kept_from or last
    return case.model_copy(update={"kept_from": origin})


def _entry(case: CaseRecord) -> CaseRecord:
    """The case as a baseline keeps it: compared with nothing, and without a per-pair trace."""
    timing = case.timing and case.timing.model_copy(update={"log_ratios": None})
    update: dict[str, Any] = {"timing": timing, "comparison": None, "base": None}
    if case.verdict in _ABOUT_COMPARISON:
        settled = Verdict.ACCURATE if timing is None else Verdict.PASS
        update |= {"verdict": settled, "reason": ""}
    return case.model_copy(update=update)


def unused(baseline: RunRecord, known_names: Collection[str]) -> list[str]:
    """Stored cases that no longer exist, in the file's order."""
    return [name for name in baseline.cases if name not in known_names]

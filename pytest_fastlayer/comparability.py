"""Which stored cases a case may be compared with, and what changed since they were stored."""

from __future__ import annotations

from pytest_fastlayer.records import CaseRecord, Device, RunRecord, Software, Timing, Verdict

#: Of a kept case whose file does not say what its run was measured with.
UNRECORDED = Software(python="not recorded", platform="not recorded")


def obstacle(
    case: CaseRecord, baseline: RunRecord | None, *, name: str, device: Device, where: str
) -> tuple[Verdict, str] | None:
    """Why ``case`` cannot be compared with ``baseline``, or None where it can.

    NO_BASELINE, OTHER_MACHINE or STALE_BASELINE, with what differs and what to do. ``where`` is
    the baseline's name for the reader. The device, workload, precision, clock, L2 state and the
    reference's digest decide; library versions and the device's clocks do not.
    """
    if baseline is None:
        return (
            Verdict.NO_BASELINE,
            f"nothing is stored at {where}: store this run with --fastlayer-update-baseline",
        )
    if not device.matches(baseline.device):
        return (
            Verdict.OTHER_MACHINE,
            f"{where} was measured on {describe(baseline.device)}, this run on "
            f"{describe(device)}: store this machine's own with --fastlayer-update-baseline",
        )
    stored = baseline.cases.get(name)
    if stored is None or stored.timing is None:
        what = "not this one" if stored is None else "no timing of this one"
        return (
            Verdict.NO_BASELINE,
            f"{where} holds {len(baseline.cases)} cases, {what}: add it with "
            "--fastlayer-update-baseline",
        )
    changes = identity_changes(case, stored)
    if changes:
        return (
            Verdict.STALE_BASELINE,
            f"{where} was stored for another {' and another '.join(changes)}: restore what "
            "changed, or accept it with --fastlayer-update-baseline and "
            f"--fastlayer-accept={name}",
        )
    return None


def identity_changes(case: CaseRecord, stored: CaseRecord) -> list[str]:
    """What decides comparability and differs, each as ``what (then, now)``; both are timed."""
    assert case.timing is not None
    assert stored.timing is not None
    rows: list[tuple[str, object, object]] = [
        *(
            (f"workload {key}", stored.workload.get(key), case.workload.get(key))
            for key in sorted(stored.workload.keys() | case.workload.keys())
        ),
        ("precision", _precision(stored), _precision(case)),
        ("clock", _clock(stored.timing), _clock(case.timing)),
        ("L2 state", stored.timing.method.l2, case.timing.method.l2),
    ]
    if stored.reference_sha256 and case.reference_sha256:
        rows.append(("reference", stored.reference_sha256, case.reference_sha256))
    return [
        f"{what} ({str(then)[:40]} then, {str(now)[:40]} now)"
        for what, then, now in rows
        if then != now
    ]


def _precision(case: CaseRecord) -> str:
    if case.precision is None:
        return "unstated"
    tf32 = "on" if case.precision.allow_tf32 else "off"
    return f"{case.precision.float32_matmul_precision}, TF32 {tf32}"


def _clock(timing: Timing) -> str:
    """Published figures were taken with CUDA events."""
    return "cuda_events" if timing.method.clock == "published" else timing.method.clock


def describe(device: Device) -> str:
    """A device with all that decides comparability, for a message."""
    units = "multiprocessors" if device.type == "cuda" else "threads"
    capability = "capability {}.{}, ".format(*device.capability) if device.capability else ""
    return f"{device.name} ({capability}{device.multiprocessors} {units}, {device.memory_mib} MiB)"


def as_of(record: RunRecord, name: str) -> RunRecord:
    """``record`` with date, commit and software of the run that its case ``name`` is of.

    A file says those of its last run; a case kept from an earlier one carries its own. What it
    does not carry is not known, and is not the last run's: UNRECORDED.
    """
    case = record.cases.get(name)
    origin = None if case is None else case.kept_from
    if origin is None:
        return record
    return record.model_copy(
        update={
            "created": origin.created,
            "commit": origin.commit,
            "software": origin.software or UNRECORDED,
        }
    )


def changed_since(now: Software | None, then: Software) -> tuple[str, ...]:
    """Telemetry that differs, as ``"torch 2.11 -> 2.13"``; explains, never forbids.

    Both are those of the cases' own runs: see ``as_of``.
    """
    if now is None:
        return ()
    if UNRECORDED in (now, then):
        whose = "stored" if then == UNRECORDED else "new"
        return (f"not known: the {whose} figure's software is not recorded",)
    old, new = then.model_dump(), now.model_dump()
    return tuple(
        f"{field} {old[field]} -> {new[field]}"
        for field in old
        if None not in (old[field], new[field]) and old[field] != new[field]
    )

"""One (reference, candidate) pair from inputs to a judged record.

The order is the point: accuracy on every seed, then the honesty probes, then time. A pair that
fails a step is recorded with its verdict and never reaches the next, so no speed is ever printed
for a wrong or dishonest candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from pydantic import JsonValue

from pytest_fastlayer import (
    accuracy,
    baselines,
    devices,
    environment,
    gate,
    handed,
    measurement,
    probes,
    stress,
    timing,
    tracing,
)
from pytest_fastlayer import statistics as stats
from pytest_fastlayer.accuracy_message import explain
from pytest_fastlayer.base import judging
from pytest_fastlayer.base.client import Request
from pytest_fastlayer.base.threeway import Question, against_base
from pytest_fastlayer.immutable import FrozenReference, freeze, held_tensors
from pytest_fastlayer.measurement import (
    Feed,
    Progress,
    Schedule,
    Stopwatch,
    arguments,
)
from pytest_fastlayer.memory import peak_memory
from pytest_fastlayer.options import Settings
from pytest_fastlayer.records import (
    Arm,
    CaseRecord,
    Device,
    PeakMemory,
    Probe,
    RootMeanSquare,
    RunRecord,
    Software,
    Timing,
    Verdict,
    Work,
)
from pytest_fastlayer.session import make_policy

FIRST_SEED = 1234
#: Share of a full measurement that a rival or a variant gets: enough to rank, not to claim.
RIVAL_EFFORT, VARIANT_EFFORT = 0.5, 0.1
#: Seconds of a reference's forward above which no further one is spent on a probe.
DEAR_S = 5.0

Inputs = Callable[[int], Any]


@dataclass(frozen=True)
class Marks:
    """What the test's own markers say."""

    tolerance: Mapping[str, Any] = field(default_factory=dict)
    timing: Mapping[str, Any] = field(default_factory=dict)
    seeds: int | None = None


@dataclass(frozen=True)
class Pair:
    """A reference, a candidate and how to feed them.

    ``inputs(seed)`` returns the positional arguments of both callables: a tuple, or one tensor.
    """

    name: str
    reference: FrozenReference
    candidate: Callable[..., Any]
    inputs: Inputs
    label: str = ""
    workload: Mapping[str, JsonValue] = field(default_factory=dict)
    work: Work | None = None
    reference_kind: str = "other"
    tolerance: accuracy.Tolerance | None = None
    float64: Callable[..., Any] | None = None
    describe: Callable[[Callable[..., Any]], Mapping[str, Any]] | None = None
    rivals: Mapping[str, Callable[[], Callable[..., Any]]] = field(default_factory=dict)
    variants: Mapping[str, Callable[[], Callable[..., Any]]] = field(default_factory=dict)
    stress: stress.Stress | None = None


@dataclass(frozen=True)
class Checked:
    """What the check of a pair hands on to its timing.

    ``cost`` is seconds a forward of (reference, candidate); ``spare`` a reference output of
    another seed than the timed one, with that seed.
    """

    case: CaseRecord
    message: str
    cost: tuple[float, float]
    spare: tuple[int, object] | None


class PairError(ValueError):
    """The pair cannot be judged: its inputs or its reference break a rule, not its candidate."""


class UnknownRivalError(ValueError):
    """``--fastlayer-rival`` names a rival that the pair does not offer."""


def device_of(*values: Any) -> torch.device:
    """The device that a pair runs on: CUDA if any tensor among ``values`` is there."""
    found = torch.device("cpu")
    pending = list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            if value.device.type == "cuda":
                return value.device
        elif isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, (tuple, list)):
            pending.extend(value)
    return found


@dataclass
class Workbench:
    """Measures and judges pairs for one test item."""

    settings: Settings
    marks: Marks
    family_size: int
    rerun: str  #: the command that replays this test
    progress: Progress
    base: Request | None = None  #: the base that timed cases are held against
    watch: probes.Watch = field(default_factory=probes.Watch)  #: taken before the candidate runs

    def knob(self, name: str, device: torch.device) -> Any:
        """A setting of this item: command line, marker, ini, or the device's default."""
        marked = self.marks.seeds if name == "seeds" else self.marks.timing.get(name)
        return self.settings.choose(name, marked, measurement.DEFAULTS[device.type][name])

    def tolerance(self, given: accuracy.Tolerance | None = None) -> accuracy.Tolerance:
        """The pair's tolerance: as given, else by marker, else by ini.

        The command line may only tighten what the test promises.
        """
        promised: dict[str, Any] = {"atol": 0.002, "rtol": 0.02, "mode": "either"}
        if given is not None:
            promised = {"atol": given.atol, "rtol": given.rtol, "mode": given.mode}
        else:
            ini = self.settings.ini
            promised |= {k: v for k, v in ini.items() if k in promised and v is not None}
            promised |= dict(self.marks.tolerance)
        for name in ("atol", "rtol"):
            asked = getattr(self.settings, name)
            if asked is None:
                continue
            if asked > promised[name]:
                raise ValueError(
                    f"--fastlayer-{name}={asked:g} would loosen this test's {name} of "
                    f"{promised[name]:g}; a tolerance is loosened only where the test states it, "
                    "with @pytest.mark.tolerance"
                )
            promised[name] = asked
        return accuracy.Tolerance(**promised)

    def run(self, pair: Pair) -> tuple[CaseRecord, dict[str, Any], str]:
        """Measure and judge a pair.

        Returns:
            The record, the run header (device, software, settings) and the failure message of the
            comparison, empty when every element is within tolerance.
        """
        first = arguments(pair.inputs, FIRST_SEED)
        device = device_of(first, held_tensors(pair.reference.target))
        key = devices.lock_key_for(device.type)
        header = self.header(device)
        variants: tuple[Arm, ...] = ()
        if self.settings.admit and pair.variants:
            with devices.device_lock(key, exclusive=True), torch.no_grad():
                pair, variants = self._admit(pair, device)
        with devices.device_lock(key, exclusive=False), torch.no_grad():
            checked = self._check(pair, device)
            if checked.case.verdict is Verdict.ACCURATE:
                checked = self._stressed(pair, checked)
        case = checked.case
        if case.verdict is Verdict.ACCURATE and self.settings.bench:
            with devices.device_lock(key, exclusive=True), torch.no_grad():
                case = self._time(pair, checked, device)
            case = self._judge(pair, case, header)
        if self.base is not None and case.timing is not None:
            checked = replace(checked, spare=None)  # an output's memory, which the base may need
            with devices.device_lock(key, exclusive=True):
                base = against_base(self.base, self._question(pair, checked, device))
            case = judging.settle(case, base, name=pair.name, policy=self.policy())
        return case.model_copy(update={"variants": variants}), header, checked.message

    def time_callables(
        self,
        reference: Callable[..., Any],
        candidate: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> Timing:
        """Paired timing alone, for the ``paired_timing`` fixture; judges nothing."""
        device = device_of(args, held_tensors(reference))
        with (
            devices.device_lock(devices.lock_key_for(device.type), exclusive=True),
            torch.no_grad(),
        ):
            watches = Stopwatch(reference, device), Stopwatch(candidate, device)
            for watch in watches:
                watch(*args)
            measured, _ = self._measure(
                getattr(reference, "target", reference),
                candidate,
                Feed(args),
                device,
                (watches[0].shortest_s, watches[1].shortest_s),
            )
            return measured

    @property
    def _seeds_are_asked(self) -> bool:
        """The number of seeds was asked for, by command line or marker: no budget cuts it."""
        return self.settings.seeds is not None or self.marks.seeds is not None

    def header(self, device: torch.device) -> dict[str, Any]:
        """What every record of this run says of machine and settings."""
        return {
            "device": environment.device_record(device).model_dump(mode="json"),
            "software": environment.software_record().model_dump(mode="json"),
            "settings": {
                name: self.knob(name, device)
                for name in ("pairs", "settle_s", "block_ms", "l2", "min_effect")
            }
            | {"alpha": self.settings.alpha},
        }

    # -- accuracy and honesty ---------------------------------------------------------------

    def _check(self, pair: Pair, device: torch.device) -> Checked:
        tolerance = self.tolerance(pair.tolerance)
        seeds = range(FIRST_SEED, FIRST_SEED + self.knob("seeds", device))
        reference, candidate = Stopwatch(pair.reference, device), Stopwatch(pair.candidate, device)
        feed = partial(arguments, pair.inputs)
        problem = probes.check_inputs(feed, FIRST_SEED)
        if problem is not None:
            raise PairError(f"{pair.name}: {problem}")
        merged = accuracy.Comparison(tolerance)
        used: list[int] = []
        expected: dict[int, object] = {}
        for seed in seeds:
            spent = (len(used) + 1) * (reference.shortest_s + candidate.shortest_s)
            if used and spent > self.knob("budget_s", device) and not self._seeds_are_asked:
                break
            self.progress(f"accuracy, seed {seed}")
            # The probes start from the first two outputs; a dear reference is not run for them.
            trial = accuracy.check_trials(
                reference, candidate, feed, [seed], tolerance, keep=int(len(used) < 2)
            )
            expected |= trial.kept
            merged = merged.merge(trial.comparison)
            used.append(seed)
        cost = (reference.shortest_s, candidate.shortest_s)
        known = expected.get(FIRST_SEED)
        rms = self._rms(pair, feed, known, tolerance, device, cost) if merged.passed else None
        del known
        pair.reference.verify()
        failure = "" if merged.passed else explain(merged, seeds=used, replay=self.rerun)
        measured = accuracy.to_record(merged, used, tolerance, rms)
        verdict, reason = Verdict.ACCURATE, ""
        if not measured.passed:
            verdict = Verdict.INCORRECT
            reason = f"{measured.failed:,} of {measured.total:,} elements are out of tolerance"
            if measured.nonfinite:
                reason += f", {measured.nonfinite:,} of them not finite"
        honesty: tuple[Probe, ...] = ()
        if verdict is Verdict.ACCURATE:
            self.progress("honesty probes")
            honesty = probes.run_probes(
                pair.reference,
                pair.candidate,
                feed,
                used,
                tolerance,
                device,
                expected=expected,
                cost=cost,
                watch=self.watch,
            )
            caught = [probe for probe in honesty if not probe.passed]
            if caught:
                verdict = Verdict.DISHONEST
                reason = "; ".join(f"{probe.name}: {probe.message}" for probe in caught)
        if verdict is not Verdict.ACCURATE:
            # Before the candidate is blamed: does the reference write into what both are given?
            problem = probes.mutated_by(pair.reference, feed(FIRST_SEED))
            if problem is not None:
                raise PairError(f"{pair.name}: {problem}")
        if not reason and len(used) < len(seeds):
            reason = f"{len(used)} of {len(seeds)} seeds fit the time budget"
        told = pair.describe(pair.candidate) if pair.describe is not None else {}
        described = handed.described(told, pair.name)
        case = CaseRecord(
            verdict=verdict,
            reason=reason,
            label=pair.label or pair.name,
            workload=dict(pair.workload),
            work=pair.work,
            reference_sha256=pair.reference.sha256,
            reference_kind=pair.reference_kind,  # type: ignore[arg-type]
            precision=environment.precision_record(),
            route=described.route,
            launch=described.launch,
            objections=described.objections,
            notes=described.notes,
            accuracy=measured,
            probes=honesty,
        )
        unlike_the_timed = next(((s, out) for s, out in expected.items() if s != FIRST_SEED), None)
        return Checked(case, failure, cost, unlike_the_timed)

    def _stressed(self, pair: Pair, checked: Checked) -> Checked:
        """What was checked, with the stress grid, where one is asked for and the pair has one."""
        grid, seeds = pair.stress, self.settings.stress
        if grid is None or seeds is None:
            return checked
        own = stress.arms_of(grid, pair.candidate)
        reference, candidate = own or (pair.reference, pair.candidate)
        frozen = reference if isinstance(reference, FrozenReference) else freeze(reference)
        found = stress.run(
            grid,
            frozen,
            candidate,
            range(FIRST_SEED, FIRST_SEED + seeds),
            self.tolerance(pair.tolerance),
            self.progress,
            self.rerun,
        )
        frozen.verify()
        changes: dict[str, Any] = {"stress": found.record}
        if found.written:
            problem = (
                f"{found.written}, the candidate overwrote its inputs: later calls see other data"
            )
            caught = Probe(name="stress_inputs_unchanged", passed=False, message=problem)
            changes |= {
                "probes": (*checked.case.probes, caught),
                "verdict": Verdict.DISHONEST,
                "reason": f"{caught.name}: {problem}",
            }
        elif found.record.failed:
            changes |= {"verdict": Verdict.INCORRECT, "reason": gate.stress_failure(found.record)}
        case = checked.case.model_copy(update=changes)
        return replace(checked, case=case, message=found.message)

    def _rms(
        self,
        pair: Pair,
        feed: Callable[[int], tuple[Any, ...]],
        known: object,
        tolerance: accuracy.Tolerance,
        device: torch.device,
        cost: tuple[float, float],
    ) -> RootMeanSquare | None:
        """Error of both arms against float64, where that fits; a diagnosis, never a gate.

        ``known`` is the reference's output for the first seed, which is not computed again.
        """
        # float64 takes a CPU at least twice as long; a GPU minutes where float32 takes seconds.
        share = 1 / DEAR_S if device.type == "cuda" else 12 / self.knob("budget_s", device)
        affordable = share * cost[0] < 1
        if not (self.settings.bench and affordable):
            return None
        self.progress("accuracy against float64")
        exact = pair.float64 or accuracy.float64_twin(pair.reference)
        try:
            trial = accuracy.check_trials(
                lambda *_: known, pair.candidate, feed, [FIRST_SEED], tolerance, float64=exact
            )
        except (RuntimeError, TypeError):
            # It does not fit, or a captured float32 tensor or a kernel refuses float64: a figure
            # less in the record, no fault of the candidate's.
            if device.type == "cuda":
                torch.cuda.empty_cache()
            return None
        return trial.record.rms_vs_float64

    # -- time ---------------------------------------------------------------------------------

    def _time(self, pair: Pair, checked: Checked, device: torch.device) -> CaseRecord:
        case, cost = checked.case, checked.cost
        asked = self._rivals(pair)  # first: one of another name must not cost a measured case
        shortest = self._schedule(device, pair).shortest_s(cost)
        limit = self.knob("max_case_s", device)
        if shortest > limit:
            return case.model_copy(
                update={
                    "verdict": Verdict.UNSUPPORTED,
                    "reason": f"the shortest timing would take {shortest:,.0f} s of the "
                    f"{limit:,.0f} s a case may take (--fastlayer-max-case)",
                }
            )
        args = arguments(pair.inputs, FIRST_SEED)
        reference = partial(pair.reference, *args)
        candidate = partial(pair.candidate, *args)
        peak = PeakMemory(
            reference=peak_memory(reference, device), candidate=peak_memory(candidate, device)
        )
        try:
            measured, watched = self._measure(
                pair.reference.target,
                pair.candidate,
                Feed(args, pair.inputs),
                device,
                cost,
                tolerance=self.tolerance(pair.tolerance),
                pair=pair,
            )
        except stats.SamplesError as error:
            return gate.judge_failure(case, error)
        except timing.TimerPatchedError as error:
            return case.model_copy(update={"verdict": Verdict.DISHONEST, "reason": str(error)})
        after = (*self._after_timing(pair, checked), self.watch.probe("state_after_timing"))
        case = case.model_copy(update={"probes": (*case.probes, *watched, *after)})
        lost = self._traces(pair, case, reference, candidate, device, cost)
        if lost:
            measured = measured.model_copy(update={"warnings": (*measured.warnings, *lost)})
        rivals = tuple(
            self._arm(pair, name, pair.rivals[name], device, RIVAL_EFFORT) for name in asked
        )
        pair.reference.verify()
        return case.model_copy(update={"timing": measured, "peak_mib": peak, "rivals": rivals})

    def _traces(
        self,
        pair: Pair,
        case: CaseRecord,
        reference: Callable[[], Any],
        candidate: Callable[[], Any],
        device: torch.device,
        cost: tuple[float, float],
    ) -> list[str]:
        """A trace of each arm, where asked for. Returns what became of those that failed.

        The case has been measured: what an arm does under a profiler does not undo that.
        """
        lost: list[str] = []
        if self.settings.trace is None:
            return lost
        for arm, function, route, module, forward_s in (
            ("reference", reference, pair.reference_kind, pair.reference.target, cost[0]),
            ("candidate", candidate, case.route or "", None, cost[1]),
        ):
            self.progress(f"trace of the {arm}")
            try:
                tracing.trace(
                    function,
                    device,
                    self.settings.trace,
                    f"{pair.name}-{arm}",
                    route=route,
                    module=module,
                    forward_s=forward_s,
                )
            except Exception as error:  # an arm's own, the profiler's, or the disk's
                lost.append(f"no trace of the {arm}: {_first_line(error)}")
        return lost

    def _question(self, pair: Pair, checked: Checked, device: torch.device) -> Question:
        """What the base of this pair is asked: the same work, tolerance and schedule."""
        measured = checked.case.accuracy
        assert measured is not None
        return Question(
            pair=pair,
            seeds=measured.seeds,
            tolerance=self.tolerance(pair.tolerance),
            exact=measured.rms_vs_float64 is not None,
            device=device,
            cost=checked.cost,
            schedule=replace(self._schedule(device), diagnostic=False),
            policy=self.policy(),
            progress=self.progress,
        )

    def _after_timing(self, pair: Pair, checked: Checked) -> tuple[Probe, ...]:
        """Still right once it has been timed, on contents that it was not timed on?

        Left out where it would take another forward of a reference that takes seconds.
        """
        seed, expected = checked.spare or (FIRST_SEED + 1, None)
        if expected is None and checked.cost[0] > DEAR_S:
            return ()
        feed = partial(arguments, pair.inputs)
        tolerance = self.tolerance(pair.tolerance)
        return (
            probes.after_timing(
                pair.reference, pair.candidate, feed, seed, tolerance, expected=expected
            ),
        )

    def _schedule(self, device: torch.device, pair: Pair | None = None) -> Schedule:
        return Schedule(
            pairs=self.knob("pairs", device),
            settle_s=self.knob("settle_s", device),
            block_ms=self.knob("block_ms", device),
            budget_s=self.knob("budget_s", device),
            l2=self.knob("l2", device),
            min_effect=self.knob("min_effect", device),
            control=1.0 if self.settings.aa else 1 / 3,
            diagnostic=pair is not None and pair.reference_kind == "oracle",
        )

    def _measure(
        self,
        reference: Callable[..., Any],
        candidate: Callable[..., Any],
        feed: Feed,
        device: torch.device,
        cost: tuple[float, float],
        effort: float | None = None,
        tolerance: accuracy.Tolerance | None = None,
        pair: Pair | None = None,
    ) -> tuple[Timing, tuple[Probe, ...]]:
        schedule = self._schedule(device, pair)
        if effort is not None:
            schedule = schedule.screening(effort)
        return measurement.measure(
            reference,
            candidate,
            feed,
            device,
            cost,
            schedule,
            self.policy(),
            self.progress,
            tolerance,
        )

    def _rivals(self, pair: Pair) -> Sequence[str]:
        unknown = [name for name in self.settings.rivals if name not in pair.rivals]
        if unknown and pair.rivals:
            raise UnknownRivalError(
                f"--fastlayer-rival={unknown[0]}: {pair.name} offers "
                f"{', '.join(sorted(pair.rivals))}"
            )
        return [name for name in self.settings.rivals if name in pair.rivals]

    def _arm(
        self,
        pair: Pair,
        name: str,
        factory: Callable[[], Callable[..., Any]],
        device: torch.device,
        effort: float,
    ) -> Arm:
        """A further arm, checked and timed against the same reference."""
        self.progress(f"arm {name}")
        tolerance = self.tolerance(pair.tolerance)
        feed = partial(arguments, pair.inputs)
        reference = Stopwatch(pair.reference, device)
        try:
            function = factory()
            candidate = Stopwatch(function, device)
            args = feed(FIRST_SEED)
            candidate(*args)  # compiles and captures: not its price
            candidate.shortest_s = math.inf
            trial = accuracy.check_trials(reference, candidate, feed, [FIRST_SEED], tolerance)
        except Exception as error:  # a stranger's code, beside a pair that must not suffer for it
            return Arm(name=name, verdict=Verdict.UNSUPPORTED, reason=_first_line(error))
        measured = trial.record
        if not measured.passed:
            return Arm(
                name=name,
                verdict=Verdict.INCORRECT,
                reason=f"{measured.failed:,} of {measured.total:,} elements out of tolerance",
                accuracy=measured,
            )
        bound = partial(function, *args)
        try:
            summary, watched = self._measure(
                pair.reference.target,
                function,
                Feed(args, pair.inputs),
                device,
                (reference.shortest_s, candidate.shortest_s),
                effort,
                tolerance,
                pair,
            )
            peak = peak_memory(bound, device)
        except stats.SamplesError as error:
            return Arm(name=name, verdict=error.verdict, reason=str(error), accuracy=measured)
        except Exception as error:  # right once, and then it raised
            reason = _first_line(error)
            return Arm(name=name, verdict=Verdict.UNSUPPORTED, reason=reason, accuracy=measured)
        policy = replace(self.policy(), require_baseline=False)
        judged = gate.judge(
            CaseRecord(
                verdict=Verdict.ACCURATE,
                accuracy=measured,
                timing=summary,
                probes=watched,
                reference_kind=pair.reference_kind,  # type: ignore[arg-type]
            ),
            None,
            name=name,
            device=environment.device_record(device),
            policy=policy,
        )
        # An arm has no baseline to compare with: its pass reads NO_BASELINE.
        passed = not gate.is_failure(judged.verdict, policy)
        return Arm(
            name=name,
            verdict=Verdict.PASS if passed else judged.verdict,
            reason="" if passed else judged.reason,
            accuracy=measured,
            timing=judged.timing and judged.timing.model_copy(update={"log_ratios": None}),
            peak_mib=peak,
        )

    def _admit(self, pair: Pair, device: torch.device) -> tuple[Pair, tuple[Arm, ...]]:
        """Every variant measured; the pair continues with the fastest that passes.

        By the lower end of its interval, so that a lucky median does not win; by its own seconds
        where the ratio is a diagnostic and has no interval. Where none passes, the pair keeps its
        own candidate and is judged as it stands.
        """
        arms = tuple(
            self._arm(pair, name, factory, device, VARIANT_EFFORT)
            for name, factory in pair.variants.items()
            if any(fnmatchcase(name, glob) for glob in self.settings.variants or ("*",))
        )
        ranks = {
            arm.name: arm.timing.ci[0] if arm.timing.ci else 1 / arm.timing.candidate_s
            for arm in arms
            if arm.verdict is Verdict.PASS and arm.timing
        }
        if not ranks:
            return pair, arms
        best = max(ranks, key=ranks.__getitem__)
        return replace(pair, candidate=pair.variants[best]()), arms

    # -- verdict --------------------------------------------------------------------------------

    def policy(self) -> gate.Policy:
        """The gate's rules for this item."""
        return make_policy(self.settings, family_size=self.family_size)

    def _judge(self, pair: Pair, case: CaseRecord, header: Mapping[str, Any]) -> CaseRecord:
        if case.timing is None:
            return case
        device = Device.model_validate(header["device"])
        path = baselines.find(self.settings.baseline, device)
        stored: RunRecord | None = baselines.load(path) if path.exists() else None
        if stored is None and self.settings.baseline_given and not self.settings.update_baseline:
            raise baselines.BaselineNotFoundError(
                f"--fastlayer-baseline={self.settings.baseline}: {path} does not exist; give a "
                "record or a folder of <device>.json files, or create it with "
                "--fastlayer-update-baseline"
            )
        return gate.judge(
            case,
            stored,
            name=pair.name,
            device=device,
            policy=self.policy(),
            baseline_path=path.name,
            software=Software.model_validate(header["software"]),
        )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def unsupported(reason: str, label: str, workload: Mapping[str, JsonValue]) -> CaseRecord:
    """The record of a case that this machine cannot hold or finish."""
    return CaseRecord(
        verdict=Verdict.UNSUPPORTED, reason=reason, label=label, workload=dict(workload)
    )

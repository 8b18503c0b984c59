"""Reference, base and head in one schedule: from three processes to the record of a base.

The base is checked first: its inputs must be this tree's, and its outputs the reference's, within
the pair's own tolerance. Then base, head and reference are timed in processes of equal kind, which
differ in the tree they were started in and in the arm they are asked for, and in nothing else. How
far two such processes differ with *one* arm is measured too: the head of the reference's process
against the head of its own is the A/A control, so a difference between processes raises the floor
and is not taken for one between trees.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from pytest_fastlayer import accuracy, gate, timing
from pytest_fastlayer import statistics as stats
from pytest_fastlayer.base import judging
from pytest_fastlayer.base.arms import FIRST_SEED, ServedPair, digest
from pytest_fastlayer.base.client import ArmError, Child, RemoteArm, RemoteClock, Request
from pytest_fastlayer.base.rounds import ArmName, Rounds, measure_rounds
from pytest_fastlayer.measurement import FIRST_TIMED_SEED, MIN_PAIRS, Progress, Schedule, arguments
from pytest_fastlayer.nvml import NvmlMonitor
from pytest_fastlayer.outputs import leaves
from pytest_fastlayer.records import BaseArm, Ratio, RootMeanSquare, Verdict
from pytest_fastlayer.samples import PairedSamples, usable_quads

#: Head and base get blocks of one size unless their costs differ by more than this factor.
ALIKE = 1.5


class OwnPair(ServedPair, Protocol):
    """The run's own pair, with its exact evaluation."""

    @property
    def float64(self) -> Callable[..., Any] | None: ...


@dataclass(frozen=True)
class Question:
    """What the run already knows of the case, and how it is to be measured and judged."""

    pair: OwnPair
    seeds: Sequence[int]
    tolerance: accuracy.Tolerance
    exact: bool  #: float64 is affordable
    device: torch.device
    cost: tuple[float, float]
    schedule: Schedule
    policy: gate.Policy
    progress: Progress


class Remote:
    """A candidate of another process, called like one of this."""

    def __init__(self, child: Child, file: Path, inputs: Callable[[int], Any]) -> None:
        self._child = child
        self._file = file
        self._inputs = inputs
        self._seed = FIRST_SEED

    def feed(self, seed: int) -> tuple[Any, ...]:
        """This process's arguments of ``seed``, which the other will make for itself."""
        self._seed = seed
        return arguments(self._inputs, seed)

    def __call__(self, *_: Any) -> dict[str, Any]:
        self._child.ask("output", arm="candidate", seed=self._seed, file=str(self._file))
        try:
            output: dict[str, Any] = torch.load(self._file, weights_only=True)
        finally:
            self._file.unlink(missing_ok=True)
        return output


def flat(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """``function`` with its output as one mapping, in the form that travels between processes."""

    def flattened(*args: Any) -> dict[str, Any]:
        return {leaf.path: leaf.value for leaf in leaves(function(*args))}

    return flattened


def against_base(request: Request, question: Question) -> BaseArm:
    """The record of the base: its figures, or why it has none. Every process is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="fastlayer-arms-") as folder:
        try:
            return _ThreeWay(request, question, Path(folder)).run()
        except ArmError as error:
            unsupported = error.status == "unsupported"
            return _record(
                request,
                status=error.status,
                reason=error.reason,
                verdict=Verdict.UNSUPPORTED if unsupported else None,
                tail=error.tail,
            )


def _record(request: Request, **facts: Any) -> BaseArm:
    base = request.base
    return BaseArm(rev=base.rev, commit=base.commit, **facts)


class _ThreeWay:
    def __init__(self, request: Request, question: Question, folder: Path) -> None:
        self._request = request
        self._ask = question
        self._folder = folder
        cost, schedule = question.cost, question.schedule
        #: A reference that takes seconds is left out of the rounds: head against base needs none.
        self._with_reference = MIN_PAIRS * cost[0] <= schedule.budget_s

    def run(self) -> BaseArm:
        ask = self._ask
        monitor = NvmlMonitor(ask.device) if ask.device.type == "cuda" else None
        company = monitor.other_processes() if monitor is not None else 0
        with ExitStack() as stack:
            ask.progress(f"base {self._request.base.rev}: starting its test")
            base = stack.enter_context(self._start("base"))
            facts = base.ready()
            self._refuse_others(facts)
            ask.progress("base: accuracy")
            measured = self._accuracy(base)
            described = base.ask("describe")
            told = {name: described[name] for name in ("route", "launch")}
            if not measured.passed:
                return _record(
                    self._request,
                    status="incorrect",
                    verdict=Verdict.INCORRECT,
                    reason=f"{measured.failed:,} of {measured.total:,} elements are out of "
                    "tolerance against this tree's reference",
                    accuracy=measured,
                    **told,
                )
            ask.progress("base: starting this tree's own arms")
            others = {
                name: stack.enter_context(self._start(name)) for name in ("head", "reference")
            }
            for child in others.values():
                child.ready()
            self._check_head(others["head"])
            if ask.device.type == "cuda":
                torch.cuda.empty_cache()  # what this process keeps for later is the children's now
            children = {"reference": others["reference"], "base": base, "head": others["head"]}
            clock = RemoteClock(
                facts["clock"], facts["resolution_s"], facts["settle_s"], tuple(children.values())
            )
            try:
                figures = self._time(children, clock, monitor, company)
            except stats.SamplesError as error:
                return _record(
                    self._request,
                    status="unresolvable",
                    verdict=error.verdict,
                    reason=str(error),
                    accuracy=measured,
                    **told,
                )
        return _record(self._request, status="measured", accuracy=measured, **told, **figures)

    def _start(self, name: str) -> Child:
        base = self._request.base
        tree = base.tree if name == "base" else base.head
        return Child(
            self._request,
            tree,
            case=self._ask.pair.name,
            device=str(self._ask.device),
            log=self._folder / f"{name}.log",
            whose="" if name == "base" else f"this tree's own {name}",
        )

    def _refuse_others(self, facts: Mapping[str, Any]) -> None:
        """A base that is another workload, or that runs this tree's code, is no base."""
        mine = digest(arguments(self._ask.pair.inputs, FIRST_SEED))
        if facts["foreign"]:
            listed = ", ".join(facts["foreign"][:3])
            raise ArmError("failed", f"it imported modules that are not its own tree's: {listed}")
        if facts["inputs"] != mine:
            raise ArmError(
                "different",
                f"its inputs for seed {FIRST_SEED} are not this tree's: the two would be timed on "
                "different work",
            )

    # -- accuracy ---------------------------------------------------------------------------

    def _accuracy(self, base: Child) -> Any:
        """The base against this tree's reference, on as many of its seeds as the budget holds."""
        ask = self._ask
        remote = Remote(base, self._folder / "base.pt", ask.pair.inputs)
        most = max(1, int(ask.schedule.budget_s / max(1e-9, sum(ask.cost))))
        seeds = list(ask.seeds)[:most]
        reference = flat(ask.pair.reference)
        trial = accuracy.check_trials(reference, remote, remote.feed, seeds, ask.tolerance)
        rms = self._rms(reference, remote) if trial.passed and ask.exact else None
        return accuracy.to_record(trial.comparison, seeds, ask.tolerance, rms)

    def _rms(self, reference: Callable[..., Any], remote: Remote) -> RootMeanSquare | None:
        ask = self._ask
        exact = flat(ask.pair.float64 or accuracy.float64_twin(ask.pair.reference))
        try:
            trial = accuracy.check_trials(
                reference, remote, remote.feed, [FIRST_SEED], ask.tolerance, float64=exact
            )
        except (RuntimeError, TypeError):  # it fits no longer, beside the base's process
            return None
        return trial.record.rms_vs_float64

    def _check_head(self, head: Child) -> None:
        """The head's process must compute what the head was accepted for in this one."""
        ask = self._ask
        remote = Remote(head, self._folder / "head.pt", ask.pair.inputs)
        trial = accuracy.check_trials(
            flat(ask.pair.reference), remote, remote.feed, [FIRST_SEED], ask.tolerance
        )
        if not trial.passed:
            raise head.error(
                "failed", "it is out of tolerance there, though it was not in the run's own process"
            )

    # -- time -------------------------------------------------------------------------------

    def _time(
        self,
        children: Mapping[str, Child],
        clock: RemoteClock,
        monitor: NvmlMonitor | None,
        company: int,
    ) -> dict[str, Any]:
        ask = self._ask
        plan, cold = ask.schedule.plan(), ask.schedule.l2 == "cold"
        arms: dict[ArmName, RemoteArm] = {
            "base": RemoteArm(children["base"], "candidate"),
            "head": RemoteArm(children["head"], "candidate"),
        }
        if self._with_reference:
            arms["reference"] = RemoteArm(children["reference"], "reference")
        settle_s = plan.settle(clock)
        ask.progress(f"base: settling {len(arms)} arms for {settle_s:.1f} s")
        costs = timing.settle_arms(arms, settle_s, clock, plan)  # type: ignore[arg-type]
        rounds = Rounds(_forwards(costs, plan), clock.resolution_s)

        def more(first_seed: int) -> None:
            measure_rounds(
                rounds,
                arms,
                clock,
                plan,
                monitor=monitor,
                first_seed=first_seed,
                progress=ask.progress,
            )

        started = time.monotonic()
        more(FIRST_TIMED_SEED)
        control = self._control(children, clock, monitor, rounds.forwards["head"])
        extensions = 0
        while True:
            telemetry = timing.Telemetry(settle_s=settle_s, other_processes=company)
            telemetry.requested_pairs = 2 * plan.quads * (extensions + 1)
            telemetry.measured_pairs = 2 * len(rounds.orders)
            samples = rounds.pair("base", "head", telemetry, cold=cold)
            summary = stats.summarize(
                samples,
                control=control,
                control_arm="candidate",
                method=telemetry.method(clock, plan),
                min_effect=ask.schedule.min_effect,
                extensions=extensions,
                dropped_reasons=telemetry.dropped_reasons(),
                clocks=telemetry.clocks(),
                warnings=telemetry.warnings(),
            )
            effect = stats.minimum_detectable_effect(summary, judging.UNITY)
            summary = summary.model_copy(update={"min_detectable_effect": effect})
            verdict = judging.verdict(summary, ask.policy)
            if verdict is not Verdict.INCONCLUSIVE or extensions == gate.MAX_EXTENSIONS:
                break
            extensions += 1
            ask.progress(f"base: undecided, extension {extensions} of {gate.MAX_EXTENSIONS}")
            more(FIRST_TIMED_SEED + len(rounds.orders))
        ask.progress(f"base: {summary.speedup:.3f}x after {time.monotonic() - started:.0f} s")
        return {
            "timing": summary,
            "verdict": verdict,
            "p_value": judging.p_value(summary),
            **self._over_reference(rounds, cold),
        }

    def _control(
        self,
        children: Mapping[str, Child],
        clock: RemoteClock,
        monitor: NvmlMonitor | None,
        forwards: int,
    ) -> PairedSamples:
        """The head in the reference's process against the head in its own."""
        ask = self._ask
        ask.progress("base: A/A control of the head in two processes")
        return timing.measure(
            RemoteArm(children["reference"], "candidate"),  # type: ignore[arg-type]
            RemoteArm(children["head"], "candidate"),  # type: ignore[arg-type]
            clock=clock,
            plan=ask.schedule.control_plan(),
            forwards=(forwards, forwards),
            monitor=monitor,
            before_quad=lambda quad: clock.renew(FIRST_TIMED_SEED + quad),
        )

    def _over_reference(self, rounds: Rounds, cold: bool) -> dict[str, Any]:
        """What head and base gain over the reference, where that was timed with them."""
        if not self._with_reference:
            return {}
        found: dict[str, Any] = {}
        names: tuple[ArmName, ...] = ("head", "base")
        for name in names:
            samples = rounds.pair("reference", name, timing.Telemetry(), cold=cold)
            usable = usable_quads(samples)
            low, high = stats.interval(usable.quad_ratios)
            point = float(np.exp(np.median(usable.quad_ratios)))
            found[name] = Ratio(value=point, ci=(float(np.exp(low)), float(np.exp(high))))
            found["reference_s"] = float(np.median(usable.reference_s))
        return found


def _forwards(costs: Mapping[str, float], plan: timing.Plan) -> dict[ArmName, int]:
    """Forwards in a block of each arm; head and base alike where that gives alike blocks."""
    found: dict[Any, int] = {name: timing.fill_block(cost, plan) for name, cost in costs.items()}
    more, fewer = max(found["base"], found["head"]), min(found["base"], found["head"])
    if more <= ALIKE * fewer:
        found["base"] = found["head"] = more
    return found

"""Reference, base and head in one schedule: from three processes to the record of a base.

The base is checked first: its inputs must be this tree's, and its outputs the reference's, within
the pair's own tolerance. Then base, head and reference are timed in processes of equal kind, which
differ in the tree they were started in and in the arm they are asked for, and in nothing else. How
far two such processes differ with *one* arm is measured too: the head of the reference's process
against the head of its own is the A/A control, so a difference between processes raises the floor
and is not taken for one between trees. A difference that is left is looked for once more in fresh
processes before it is believed (``judging.Processes``).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from pytest_fastlayer import accuracy, gate, records, timing
from pytest_fastlayer import statistics as stats
from pytest_fastlayer.base import judging
from pytest_fastlayer.base.arms import FIRST_SEED, ServedPair, digest, flattened
from pytest_fastlayer.base.client import (
    ArmError,
    Child,
    DishonestArmError,
    RemoteArm,
    RemoteClock,
    Request,
)
from pytest_fastlayer.base.figures import ProcessSet, summarize
from pytest_fastlayer.base.rounds import ArmName, Rounds, measure_rounds
from pytest_fastlayer.base.witness import TimedOutputs
from pytest_fastlayer.feeding import arguments
from pytest_fastlayer.measurement import FIRST_TIMED_SEED, MIN_PAIRS, Progress, Schedule
from pytest_fastlayer.nvml import NvmlMonitor
from pytest_fastlayer.records import BaseArm, RootMeanSquare, Verdict
from pytest_fastlayer.report import text
from pytest_fastlayer.samples import PairedSamples

#: Verdict of a base that its process's failure says something of.
_VERDICTS = {"unsupported": Verdict.UNSUPPORTED, "incorrect": Verdict.INCORRECT}
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


class OwnFaultError(Exception):
    """This tree's own code raised, in this process: its ``__cause__`` is the test's to raise."""


def own(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of this tree, whose exceptions are not the base's."""

    def called(*args: Any) -> Any:
        try:
            return function(*args)
        except torch.OutOfMemoryError:  # it did fit, before there were the base's processes
            raise
        except Exception as error:
            raise OwnFaultError from error

    return called


class Remote:
    """A candidate of another process, called like one of this."""

    def __init__(self, child: Child, file: Path, inputs: Callable[[int], Any]) -> None:
        self._child = child
        self._file = file
        self._inputs = own(inputs)
        self._seed = FIRST_SEED
        #: Arguments that were not what they had been when it returned, in order.
        self.overwrote: dict[str, None] = {}

    def feed(self, seed: int) -> tuple[Any, ...]:
        """This process's arguments of ``seed``, which the other will make for itself."""
        self._seed = seed
        return arguments(self._inputs, seed)

    def __call__(self, *_: Any) -> dict[str, Any]:
        order = {"arm": "candidate", "seed": self._seed, "file": str(self._file)}
        self.overwrote |= dict.fromkeys(self._child.ask("output", **order)["overwrote"])
        try:
            output: dict[str, Any] = torch.load(self._file, weights_only=True)
        except Exception as error:  # the file is what the other process's code made of it
            reason = f"its output cannot be read: {type(error).__name__}: {error}"
            raise self._child.error("failed", text.plain(reason), self._child.tail()) from None
        finally:
            self._file.unlink(missing_ok=True)
        return output


def flat(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """``function`` of this tree with its output in the form that travels between processes."""
    return own(lambda *args: flattened(function(*args)))


def against_base(request: Request, question: Question) -> BaseArm:
    """The record of the base: its figures, or why it has none. Every process is gone afterwards.

    Raises:
        DishonestArmError: this tree's candidate does not compute what it is timed for.
    """
    with tempfile.TemporaryDirectory(
        prefix="fastlayer-arms-", dir=request.base.scratch, ignore_cleanup_errors=True
    ) as folder:
        try:
            return _ThreeWay(request, question, Path(folder)).run()
        except ArmError as error:
            return _record(
                request,
                status=error.status,
                reason=error.reason,
                verdict=_VERDICTS.get(error.status),
                tail=error.tail,
            )
        except DishonestArmError:
            raise
        except OwnFaultError as fault:
            raise (fault.__cause__ or fault) from None
        except Exception as error:  # a base may do what it likes, this tree's test goes on
            reason = f"it cannot be held against this tree: {type(error).__name__}: {error}"
            return _record(request, status="failed", reason=text.plain(reason, 300))


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
        sets: list[ProcessSet] = []
        checked: dict[str, Any] = {}
        while True:
            with ExitStack() as stack:
                ask.progress(f"base {self._request.base.rev}: starting its test")
                self._release()
                # A context on a GPU takes seconds, so all are started at once; a CPU's cores are
                # not spent on arms of a base that cannot serve.
                is_patient = not sets and ask.device.type == "cpu"
                mine = ("head", "reference")
                children = self._start(stack, "base", *(() if is_patient else mine))
                found = children["base"].ready()
                if not sets:
                    self._refuse_others(found)
                    checked = self._check(children["base"])
                    if "status" in checked:
                        return _record(self._request, **checked)
                if is_patient:
                    children |= self._start(stack, *mine)
                # The clock of every process is this tree's: what the base says of its own is not
                # needed.
                facts = {name: children[name].ready() for name in mine}["head"]
                if not sets:
                    self._check_head(children["head"])
                clock = RemoteClock(
                    facts["clock"],
                    facts["resolution_s"],
                    facts["settle_s"],
                    tuple(children.values()),
                    TimedOutputs(
                        flat(ask.pair.reference), own(ask.pair.inputs), ask.tolerance, self._folder
                    ),
                )
                forwards = sets[0].rounds.forwards if sets else None
                sets.append(self._measure(children, clock, monitor, forwards))
            try:
                figures = summarize(sets, ask.schedule, clock, ask.policy, company)
            except stats.SamplesError as error:
                told = {"status": "unresolvable", "verdict": error.verdict, "reason": str(error)}
                return _record(self._request, **checked | told)
            if not judging.wants_more(figures["verdict"], figures["timing"], len(sets)):
                return _record(self._request, status="measured", **checked, **figures)
            ask.progress(f"base: {figures['timing'].speedup:.3f}x, once more in fresh processes")

    def _release(self) -> None:
        """What this process keeps of a GPU's memory for later is the arms' now."""
        if self._ask.device.type == "cuda":
            torch.cuda.empty_cache()

    def _check(self, base: Child) -> dict[str, Any]:
        """Accuracy, route and launch of the base, with the status where it is wrong."""
        self._ask.progress("base: accuracy")
        remote = Remote(base, self._folder / "base.pt", self._ask.pair.inputs)
        measured = self._accuracy(remote)
        described = base.ask("describe")
        found = {name: described[name] for name in ("route", "launch")} | {"accuracy": measured}
        if not measured.passed:
            reason = (
                f"{measured.failed:,} of {measured.total:,} elements are out of tolerance against "
                "this tree's reference"
            )
        elif remote.overwrote:
            edited = text.plain(", ".join(remote.overwrote))
            reason = f"it overwrote {edited}: later calls, and the timed ones, see other data"
        else:
            return found
        return found | {"status": "incorrect", "verdict": Verdict.INCORRECT, "reason": reason}

    def _start(self, stack: ExitStack, *names: str) -> dict[str, Child]:
        """The processes of these arms, which end with ``stack``."""
        base = self._request.base
        return {
            name: stack.enter_context(
                Child(
                    self._request,
                    base.tree if name == "base" else base.head,
                    case=self._ask.pair.name,
                    device=str(self._ask.device),
                    log=self._folder / f"{name}.log",
                    whose="" if name == "base" else f"this tree's own {name}",
                )
            )
            for name in names
        }

    def _refuse_others(self, facts: Mapping[str, Any]) -> None:
        """A base that is another workload, or that runs this tree's code, is no base."""
        mine = digest(arguments(own(self._ask.pair.inputs), FIRST_SEED))
        if facts["foreign"]:
            listed = text.plain(", ".join(facts["foreign"][:3]), 300)
            raise ArmError("failed", f"it imported modules that are not its own tree's: {listed}")
        if facts["inputs"] != mine:
            raise ArmError(
                "different",
                f"its inputs for seed {FIRST_SEED} are not this tree's: the two would be timed on "
                "different work",
            )

    # -- accuracy ---------------------------------------------------------------------------

    def _accuracy(self, remote: Remote) -> records.Accuracy:
        """The base against this tree's reference, on as many of its seeds as the budget holds."""
        ask = self._ask
        most = max(1, int(ask.schedule.budget_s / max(1e-9, sum(ask.cost))))
        seeds = list(ask.seeds)[:most]
        reference = flat(ask.pair.reference)
        trial = accuracy.check_trials(reference, remote, remote.feed, seeds, ask.tolerance)
        rms = self._rms(reference, remote) if trial.passed and ask.exact else None
        return accuracy.to_record(trial.comparison, seeds, ask.tolerance, rms)

    def _rms(self, reference: Callable[..., Any], remote: Remote) -> RootMeanSquare | None:
        ask = self._ask
        exact = ask.pair.float64 or accuracy.float64_twin(ask.pair.reference)
        try:
            trial = accuracy.check_trials(
                reference,
                remote,
                remote.feed,
                [FIRST_SEED],
                ask.tolerance,
                float64=lambda *args: flattened(exact(*args)),
            )
        except (RuntimeError, TypeError):  # it fits no longer, beside the base's process
            return None
        return trial.record.rms_vs_float64

    def _check_head(self, head: Child) -> None:
        """The head's process must compute what this one's candidate was accepted for."""
        ask = self._ask
        remote = Remote(head, self._folder / "head.pt", ask.pair.inputs)
        trial = accuracy.check_trials(
            flat(ask.pair.candidate), remote, remote.feed, [FIRST_SEED], ask.tolerance
        )
        if not trial.passed:
            raise head.error("failed", "it computes something else than in the run's own process")

    # -- time -------------------------------------------------------------------------------

    def _measure(
        self,
        children: Mapping[str, Child],
        clock: RemoteClock,
        monitor: NvmlMonitor | None,
        forwards: Mapping[ArmName, int] | None,
    ) -> ProcessSet:
        """All rounds and the control of one set of processes; ``forwards`` as of an earlier one."""
        ask = self._ask
        self._release()
        plan = ask.schedule.plan()
        arms: dict[ArmName, RemoteArm] = {
            "base": RemoteArm(children["base"], "candidate"),
            "head": RemoteArm(children["head"], "candidate"),
        }
        if self._with_reference:
            arms["reference"] = RemoteArm(children["reference"], "reference")
        settle_s = plan.settle(clock)
        ask.progress(f"base: settling {len(arms)} arms for {settle_s:.1f} s")
        costs = timing.settle_arms(arms, settle_s, clock, plan)  # type: ignore[arg-type]
        rounds = Rounds(forwards or _forwards(costs, plan), clock.resolution_s)
        measure_rounds(
            rounds,
            arms,
            clock,
            plan,
            monitor=monitor,
            first_seed=FIRST_TIMED_SEED,
            progress=ask.progress,
        )
        control = self._control(children, clock, monitor, rounds.forwards["head"])
        self._look_once_more(arms, clock, rounds.forwards, cold=plan.l2 == "cold")
        return ProcessSet(rounds, control)

    @staticmethod
    def _look_once_more(
        arms: Mapping[ArmName, RemoteArm],
        clock: RemoteClock,
        forwards: Mapping[ArmName, int],
        *,
        cold: bool,
    ) -> None:
        """A last block of each arm, which is looked at whatever it costs: no figure of its own."""
        assert isinstance(clock.witness, TimedOutputs)
        clock.witness.is_strict = True
        for name, arm in arms.items():
            clock.block(arm, forwards[name], cold=cold)

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


def _forwards(costs: Mapping[str, float], plan: timing.Plan) -> dict[ArmName, int]:
    """Forwards in a block of each arm; head and base alike where that gives alike blocks."""
    found: dict[Any, int] = {name: timing.fill_block(cost, plan) for name, cost in costs.items()}
    more, fewer = max(found["base"], found["head"]), min(found["base"], found["head"])
    if more <= ALIKE * fewer:
        found["base"] = found["head"] = more
    return found

"""Arms that go wrong while they are served, and what is made of it in the run's own process."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_fastlayer import gate
from pytest_fastlayer.accuracy import Tolerance
from pytest_fastlayer.base import threeway
from pytest_fastlayer.base.arms import Arms, Fed
from pytest_fastlayer.base.client import Child, DishonestArmError, RemoteArm, Request
from pytest_fastlayer.base.trees import Base, Tree
from pytest_fastlayer.base.witness import TimedOutputs
from pytest_fastlayer.feeding import Feed
from pytest_fastlayer.immutable import FrozenReference, freeze
from pytest_fastlayer.measurement import Schedule
from pytest_fastlayer.pairing import judging
from pytest_fastlayer.pairing.pair import Draft
from pytest_fastlayer.records import Accuracy, CaseRecord, Method, Timing, Verdict

RIGHT = Accuracy(
    trials=1,
    seeds=(1234,),
    failed=0,
    nonfinite=0,
    total=8,
    tolerance=Tolerance().record(),
)
JOB = {"device": "cpu", "tree": "/base", "other": None}
TREE = Tree(Path("/base"), Path("/base"))


def inputs(seed):
    return (torch.randn(8, generator=torch.Generator().manual_seed(seed)),)


@dataclasses.dataclass
class Pair:
    candidate: Callable[..., Any]
    reference: FrozenReference = dataclasses.field(default_factory=lambda: freeze(torch.relu))
    inputs: Callable[[int], Any] = inputs
    describe: Any = None
    float64: Any = None
    name: str = "a"


class Script:
    """A channel that orders, and keeps what is answered."""

    def __init__(self, *orders):
        self.orders = [{"id": i} | order for i, order in enumerate(orders)] + [{"do": "stop"}]
        self.said = []

    def receive(self):
        return self.orders.pop(0)

    def send(self, message):
        self.said.append(message)


def raising(error):
    def candidate(x):
        raise error

    return candidate


def zeroing(x):
    y = torch.relu(x)
    x.zero_()
    return y


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (pytest.skip.Exception("not here"), "Skipped: not here"),
        (ValueError("odd"), "ValueError: odd"),
    ],
)
def test_whatever_an_arm_raises_is_its_answer(error, said, capsys):
    channel = Script(
        {"do": "block", "arm": "candidate", "forwards": 1, "cold": False},
        {"do": "renew", "seed": 2},
    )
    Arms(Pair(raising(error)), JOB).obey(channel)
    assert channel.said[0]["event"] == "pair"
    assert channel.said[1:] == [
        {"event": "answer", "id": 0, "error": said},
        {"event": "answer", "id": 1},
    ]
    assert "in candidate" in capsys.readouterr().err


# -- in the run's own process -----------------------------------------------------------------


class Local(Child):
    """An arm without a process: its orders are obeyed at once."""

    pair = Pair(torch.relu)

    def __init__(self, request, tree, *, case, device, log, whose=""):
        self._whose, self._arms = whose, Arms(self.pair, JOB)

    def ready(self):
        return self._arms._facts()

    def ask(self, do, **order):
        return getattr(self._arms, f"_{do}")(**order)

    def tail(self):
        return ()

    def close(self, patience_s=0.0):
        pass

    _is_ready = True


@pytest.fixture
def held_against(monkeypatch, tmp_path):
    """The record of a base whose candidate (and so on) is given; the head is relu, unless given."""

    def held(candidate=torch.relu, own=torch.relu, head=torch.relu, **changes):
        class Theirs(Local):
            def __init__(self, *given, whose="", **named):
                self.pair = Pair(head) if whose else Pair(candidate, **changes)
                super().__init__(*given, whose=whose, **named)

        monkeypatch.setattr(threeway, "Child", Theirs)
        question = threeway.Question(
            pair=Pair(torch.relu, freeze(own)),
            seeds=(1234, 1235),
            tolerance=Tolerance(),
            exact=False,
            device=torch.device("cpu"),
            cost=(1e-3, 1e-3),
            schedule=Schedule(6, 0, 1, 1, "warm", 0.01),
            policy=gate.Policy(),
            progress=lambda line: None,
        )
        base = Base("main", None, TREE, TREE, scratch=tmp_path)
        return threeway.against_base(Request(base, "test_a.py::test_a", (), None, 1.0), question)

    return held


def test_a_base_that_writes_to_its_input_has_no_speed(held_against):
    base = held_against(zeroing)
    assert (base.status, base.verdict) == ("incorrect", "INCORRECT")
    assert base.reason.startswith("it overwrote input[0]: ")
    assert base.accuracy.failed == 0


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        (lambda x: torch.relu(x).to_sparse(), "OutputError: candidate output['output'] is"),
        (raising(KeyError("route")), "KeyError: 'route'"),
    ],
)
def test_what_cannot_be_compared_is_a_failure_of_the_base(held_against, candidate, reason):
    base = held_against(candidate)
    assert base.status == "failed"
    assert base.reason.startswith(f"it cannot be held against this tree: {reason}")


def test_an_output_that_cannot_be_read_is_a_failure_of_the_base(held_against, monkeypatch):
    monkeypatch.setattr(torch, "save", lambda output, file: Path(file).write_bytes(b"no archive"))
    base = held_against()
    assert base.status == "failed"
    assert base.reason.startswith("its output cannot be read: ")


def test_this_tree_s_own_error_is_its_test_s(held_against):
    with pytest.raises(ZeroDivisionError, match="own"):
        held_against(own=raising(ZeroDivisionError("own")))


def test_a_base_of_other_inputs_is_another_workload(held_against):
    base = held_against(inputs=lambda seed: (torch.ones(8),))
    assert base.status == "different"


# -- what is timed is what was asked for --------------------------------------------------------


def wrong_while_timed(x):
    return torch.relu(x) if gc.isenabled() else x  # no collection inside a block


class WrongLater:
    """Right in its first timed blocks, instantly wrong in all that follow."""

    def __init__(self, blocks):
        self.left, self.was_timed = blocks, False

    def __call__(self, x):
        is_timed = not gc.isenabled()
        self.left -= is_timed and not self.was_timed
        self.was_timed = is_timed
        return torch.relu(x) if self.left >= 0 else x


SAID = "an output of a timed block is not the reference's on the same contents"


@pytest.mark.parametrize("candidate", [wrong_while_timed, WrongLater(6)])
def test_a_base_that_is_wrong_while_it_is_timed_has_no_figure(held_against, candidate):
    base = held_against(candidate)
    assert (base.status, base.verdict, base.timing) == ("incorrect", "INCORRECT", None)
    assert base.reason.startswith(SAID)


def test_a_head_that_is_wrong_while_it_is_timed_is_dishonest(held_against):
    with pytest.raises(DishonestArmError, match=f"this tree's own head: {SAID}"):
        held_against(head=wrong_while_timed)


def test_honest_arms_are_measured(held_against):
    base = held_against()
    assert base.status == "measured"
    assert base.timing is not None


def test_a_timer_that_is_replaced_where_an_arm_is_served_is_named(held_against, monkeypatch):
    original = time.perf_counter

    def patching(x):
        if not gc.isenabled():
            monkeypatch.setattr(time, "perf_counter", lambda: original() / 10)
        return torch.relu(x)

    base = held_against(patching)
    assert base.status == "failed"
    assert base.reason.startswith("time.perf_counter replaced")


def test_no_call_of_a_block_is_safe_from_being_looked_at():
    feed, calls = Feed((0,)), []
    fed = Fed(lambda _: calls.append(1) or len(calls), feed)
    kept = set()
    for _ in range(100):
        calls.clear()
        fed.keep_one_of(3)
        for _ in range(3):
            fed()
        kept.add(fed.take())
        assert fed.take() is None  # and it is let go
    assert kept == {1, 2, 3}


def test_blocks_are_looked_at_as_time_allows(tmp_path):
    arm, other = RemoteArm(object(), "candidate"), RemoteArm(object(), "candidate")
    witness = TimedOutputs(lambda x: {"output": x}, inputs, Tolerance(), tmp_path)
    assert witness.file(arm) is None  # settling
    witness.renewed(1)
    assert witness.file(arm)
    assert {witness.file(arm) is None for _ in range(100)} == {True, False}
    witness._spent_s = 1e9
    assert {witness.file(arm) for _ in range(100)} == {None}
    assert witness.file(other)  # each arm's first block
    witness.is_strict = True
    assert witness.file(arm)


def test_a_dishonest_head_has_no_figure(monkeypatch):
    def against_base(request, question):
        raise DishonestArmError("in the process of this tree's own head: wrong")

    monkeypatch.setattr(judging, "against_base", against_base)
    timing = Timing(
        method=Method(clock="cpu_clock", settle_s=0, block_ms=1),
        reference_s=1,
        candidate_s=1,
        speedup=1,
        ci=(1, 1),
        noise_floor=0,
        pairs=6,
    )
    draft = Draft(CaseRecord(verdict=Verdict.PASS, accuracy=RIGHT, timing=timing), cost=(1, 1))
    terms = SimpleNamespace(
        tolerance=lambda own: Tolerance(),
        schedule=lambda device: Schedule(6, 0, 1, 1, "warm", 0.01),
        policy=gate.Policy,
        progress=print,
    )
    pair = SimpleNamespace(tolerance=None, name="a")
    judging.hold_against_base(pair, terms, draft, None, torch.device("cpu"))
    assert draft.case.verdict is Verdict.DISHONEST
    assert draft.case.timing is None
    assert draft.case.reason == "served_output: in the process of this tree's own head: wrong"

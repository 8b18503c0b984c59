"""Arms that go wrong while they are served, and what is made of it in the run's own process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fastlayer import gate
from pytest_fastlayer.accuracy import Tolerance
from pytest_fastlayer.base import threeway
from pytest_fastlayer.base.arms import Arms
from pytest_fastlayer.base.client import Child, Request
from pytest_fastlayer.base.trees import Base, Tree
from pytest_fastlayer.immutable import FrozenReference, freeze
from pytest_fastlayer.measurement import Schedule

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
    """The record of a base whose candidate (and so on) is given; the head is relu."""

    def held(candidate=torch.relu, own=torch.relu, **changes):
        class Theirs(Local):
            pair = Pair(candidate, **changes)

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

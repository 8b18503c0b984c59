"""What a test hands over, and the record of it as it grows from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pydantic import JsonValue

from pytest_fastlayer.comparison import Tolerance
from pytest_fastlayer.immutable import FrozenReference
from pytest_fastlayer.records import CaseRecord, Verdict, Work
from pytest_fastlayer.stress import Stress

FIRST_SEED = 1234
#: Seconds of a reference's forward above which no further one is spent on a probe.
DEAR_S = 5.0

#: What ends the run, whoever raises it: never an arm's to answer for. pytest's is an Exception.
ENDS_RUN = (KeyboardInterrupt, pytest.exit.Exception)
#: What else an arm's code may raise: sys.exit(), pytest.importorskip and pytest.fail are
#: no Exceptions.
RAISED = (Exception, SystemExit, pytest.skip.Exception, pytest.fail.Exception)

Inputs = Callable[[int], Any]


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
    tolerance: Tolerance | None = None
    float64: Callable[..., Any] | None = None
    describe: Callable[[Callable[..., Any]], Mapping[str, Any]] | None = None
    rivals: Mapping[str, Callable[[], Callable[..., Any]]] = field(default_factory=dict)
    variants: Mapping[str, Callable[[], Callable[..., Any]]] = field(default_factory=dict)
    stress: Stress | None = None


@dataclass
class Draft:
    """The record of a case as far as it has been measured, and what one step hands to the next.

    ``message`` explains which elements failed; ``cost`` is seconds a forward of (reference,
    candidate); ``spare`` a reference output of another seed than the timed one, with that seed;
    ``step`` what is being done with it.
    """

    case: CaseRecord
    step: str = "checked"
    message: str = ""
    cost: tuple[float, float] = (math.inf, math.inf)
    spare: tuple[int, object] | None = None

    @property
    def is_accurate(self) -> bool:
        """So far nothing speaks against timing it."""
        return self.case.verdict is Verdict.ACCURATE

    @property
    def has_figures(self) -> bool:
        """Something has been measured that is worth keeping."""
        return self.case.accuracy is not None or bool(self.case.variants)

    def add(self, **figures: Any) -> None:
        """Put fields of the record in."""
        self.case = self.case.model_copy(update=figures)


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


def unsupported(reason: str, label: str, workload: Mapping[str, JsonValue]) -> CaseRecord:
    """The record of a case that this machine cannot hold or finish."""
    return CaseRecord(
        verdict=Verdict.UNSUPPORTED, reason=reason, label=label, workload=dict(workload)
    )


def first_line(error: BaseException) -> str:
    """An exception as records tell it."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]

"""What the served arms compute while they are timed, held against this tree's own reference.

An arm may be right while it is asked for its output and wrong while it is timed, in its own process
as in the run's. So blocks that it cannot foresee hand back the output of a call that it cannot
foresee, and this process, in which it does not run, compares that with what its reference makes of
the same contents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pytest_fastlayer import accuracy
from pytest_fastlayer.accuracy_message import explain
from pytest_fastlayer.base.client import RemoteArm
from pytest_fastlayer.feeding import arguments
from pytest_fastlayer.originals import draw, perf_counter
from pytest_fastlayer.outputs import OutputError
from pytest_fastlayer.probes.run import loosened
from pytest_fastlayer.report import text

#: Share of the time that may go into comparing, once every arm has been looked at.
SHARE = 0.1
#: Of the blocks that there is time to look at, one in so many is.
ONE_IN = 2


@dataclass
class TimedOutputs:
    """Looks at each arm's first block, at others as time allows, and at every one if ``is_strict``.

    ``reference`` and ``inputs`` are this process's; outputs are flat, as they travel.
    """

    reference: Callable[..., dict[str, Any]]
    inputs: Callable[[int], Any]
    tolerance: accuracy.Tolerance
    folder: Path
    is_strict: bool = False
    checks: int = 0
    _seed: int | None = None
    _expected: dict[str, Any] | None = field(default=None, repr=False)
    _seen: set[tuple[int, str]] = field(default_factory=set)
    _spent_s: float = 0.0
    _begin: float = field(default_factory=perf_counter)

    def renewed(self, seed: int) -> None:
        if seed != self._seed:
            self._seed, self._expected = seed, None

    def file(self, arm: RemoteArm) -> Path | None:
        if self._seed is None:  # settling: its times are no figures
            return None
        key = id(arm.child), arm.arm
        has_time = self._spent_s <= SHARE * (perf_counter() - self._begin)
        if self.is_strict or key not in self._seen or (has_time and draw(ONE_IN) == 0):
            self._seen.add(key)
            return self.folder / "timed.pt"
        return None

    def look(self, arm: RemoteArm, file: Path) -> None:
        begin = perf_counter()
        problem = self._problem(file)
        self.checks += 1
        self._spent_s += perf_counter() - begin
        if problem:
            raise arm.child.accusation(
                arm.arm,
                "incorrect",
                "an output of a timed block is not the reference's on the same contents, though "
                f"it was when it was not timed: {text.plain(problem, 300)}",
            )

    def _problem(self, file: Path) -> str:
        try:
            output = torch.load(file, weights_only=True)
        except Exception as error:  # the file is what the other process's code made of it
            return f"it cannot be read: {type(error).__name__}: {error}"
        finally:
            file.unlink(missing_ok=True)
        assert self._seed is not None
        if self._expected is None:
            with torch.no_grad():
                self._expected = self.reference(*arguments(self.inputs, self._seed))
        try:
            found = accuracy.compare(output, self._expected, loosened(self.tolerance))
        except OutputError as error:
            return str(error)
        finally:
            if torch.cuda.is_initialized():  # the arms' processes need the memory
                torch.cuda.empty_cache()
        return "" if found.passed else explain(found).splitlines()[0]

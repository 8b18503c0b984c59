"""A clock that reads what the arms say they cost, so that no test depends on speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pytest_fastlayer.clocks import BlockTime


class ScriptedClock:
    """Runs an arm once a block, to learn which it is, and reads the time from a script."""

    name: Literal["cuda_events", "cpu_clock"] = "cpu_clock"
    resolution_s = 1e-7
    settle_s = 0.0

    def __init__(self, reference_s: float = 0.020, candidate_s: float = 0.010) -> None:
        self.seconds = {"A": reference_s, "B": candidate_s}
        self.blocks: list[tuple[str, int, bool]] = []
        self.tail = {"A": 0.0, "B": 0.0}
        self.now = 0.0

    def arm(self, label: str) -> Callable[[], object]:
        return lambda: label

    def block(self, fn: Callable[[], Any], forwards: int, *, cold: bool = False) -> BlockTime:
        label = fn()
        self.blocks.append((label, forwards, cold))
        seconds = self.seconds[label] * forwards
        self.now += seconds
        return BlockTime(seconds, seconds + self.tail[label], self.tail[label])

    def synchronize(self) -> None:
        pass

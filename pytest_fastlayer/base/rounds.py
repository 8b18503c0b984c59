"""Three arms in balanced orders: A = reference, B = base, C = head.

A round is a palindrome, ``ABC CBA``, so that each arm's two blocks lie around the same moment and
a drift that is linear over the round cancels in the ratio of *every* two arms. The roles rotate
from round to round (``BCA ACB``, ``CAB BAC``), and back (``CBA ABC``, ``BAC CAB``, ``ACB BCA``):
each arm is first, in the middle and last as often as the others, and follows each of them about as
often. For any two arms a round is what the paired schedule calls a quad, and the same statistics
serve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pytest_fastlayer.clocks import BlockTime, _perf_counter
from pytest_fastlayer.nvml import ClockReading, NvmlMonitor
from pytest_fastlayer.plan import Plan
from pytest_fastlayer.samples import PairedSamples
from pytest_fastlayer.telemetry import Telemetry

ArmName = Literal["reference", "base", "head"]
Progress = Callable[[str], None]


class FeedingClock(Protocol):
    """A clock that also renews what its arms are fed."""

    def block(self, fn: Any, forwards: int, *, cold: bool = False) -> BlockTime: ...
    def renew(self, seed: int) -> None: ...


@dataclass
class Rounds:
    """Raw times of whole rounds, in measured order: two blocks of each arm a round."""

    forwards: Mapping[ArmName, int]  #: in one block of each arm
    resolution_s: float
    orders: list[tuple[ArmName, ...]] = field(default_factory=list)  #: of the first half of each
    blocks: dict[ArmName, list[BlockTime]] = field(default_factory=dict)
    readings: dict[ArmName, list[ClockReading | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.forwards:
            self.blocks[name], self.readings[name] = [], []

    def order(self) -> tuple[ArmName, ...]:
        """Of the first half of the next round: the roles rotate, forwards and then backwards."""
        names = sorted(self.forwards, key=("reference", "base", "head").index)
        lap, turn = divmod(len(self.orders), len(names))
        if lap % 2:
            names.reverse()
        return (*names[turn:], *names[:turn])

    def pair(
        self, first: ArmName, second: ArmName, telemetry: Telemetry, *, cold: bool = False
    ) -> PairedSamples:
        """The samples of two of the arms, ``first`` in the place of the reference.

        ``telemetry`` is filled with what was seen of the two since the first round.
        """
        for label, name in (("A", first), ("B", second)):
            for block in self.blocks[name]:
                telemetry.note(label, block, cold=cold)
        seen = zip(self.readings[first], self.readings[second], strict=True)
        keep = telemetry.usable([{"A": a, "B": b} for a, b in seen])
        sides: list[str] = []
        for order in self.orders:
            leads = order.index(first) < order.index(second)
            sides += ("AB", "BA") if leads else ("BA", "AB")
        counts = self.forwards[first], self.forwards[second]
        return PairedSamples(
            reference_s=tuple(block.seconds / counts[0] for block in self.blocks[first]),
            candidate_s=tuple(block.seconds / counts[1] for block in self.blocks[second]),
            order=tuple(sides),
            forwards=counts,
            resolution_s=self.resolution_s,
            keep=None if all(keep) else tuple(keep),
        )


def measure_rounds(
    rounds: Rounds,
    arms: Mapping[ArmName, Any],
    clock: FeedingClock,
    plan: Plan,
    *,
    monitor: NvmlMonitor | None = None,
    first_seed: int,
    progress: Progress,
) -> None:
    """Append as many rounds as the plan has quads and its budget holds.

    ``arms`` are what the clock times. Contents are renewed before each round, untimed, to those
    of ``first_seed`` and up. An exception of the clock passes through; a round that it breaks
    off is not kept.
    """
    begin = _perf_counter()
    wanted, done = plan.quads, 0
    while done < wanted:
        clock.renew(first_seed + done)
        order = rounds.order()
        half: Sequence[ArmName] = (*order, *reversed(order))
        measured: list[tuple[ArmName, BlockTime, ClockReading | None]] = []
        for name in half:
            block = clock.block(arms[name], rounds.forwards[name], cold=plan.l2 == "cold")
            measured.append((name, block, monitor.read() if monitor is not None else None))
        rounds.orders.append(order)
        for name, block, reading in measured:
            rounds.blocks[name].append(block)
            rounds.readings[name].append(reading)
        done += 1
        spent = _perf_counter() - begin
        wanted = plan.quads_within(spent / done, spent, done)
        if done % max(1, wanted // 10) == 0:
            left = spent / done * (wanted - done)
            progress(f"base: round {done}/{wanted}, about {left:.0f} s left")

"""How to time one case: pairs, settling, block length, budget, cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_fastlayer.clocks import Clock

#: Share of a budget that settling may take.
SETTLE_SHARE = 0.25


@dataclass(frozen=True)
class Plan:
    """The schedule of one case.

    ``pairs`` pairs of blocks (rounded up to whole quads), ``settle_s`` seconds of both arms in
    alternation before the first block (None: the clock's default, 10 s on CUDA, 0.5 s on CPU),
    blocks of ``block_ms`` milliseconds, at most ``budget_s`` seconds in all but never fewer than
    ``min_pairs`` pairs, cache ``l2`` warm or cold.
    """

    pairs: int = 100
    settle_s: float | None = None
    block_ms: float = 50.0
    budget_s: float | None = None
    l2: Literal["warm", "cold"] = "warm"
    min_pairs: int = 6

    def __post_init__(self) -> None:
        rules: Sequence[tuple[str, bool, str]] = (
            ("pairs", self.pairs >= 2, "at least 2 (one AB/BA quad)"),
            ("min_pairs", self.min_pairs >= 2, "at least 2 (one AB/BA quad)"),
            ("settle_s", self.settle_s is None or self.settle_s >= 0, "zero or more seconds"),
            ("block_ms", self.block_ms > 0, "more than 0 milliseconds"),
            ("budget_s", self.budget_s is None or self.budget_s > 0, "more than 0 seconds"),
            ("l2", self.l2 in ("warm", "cold"), '"warm" or "cold"'),
        )
        for name, fine, rule in rules:
            if not fine:
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected {rule}")

    @property
    def quads(self) -> int:
        """AB/BA quads wanted."""
        return (self.pairs + 1) // 2

    def settle(self, clock: Clock) -> float:
        """Seconds of settling, of both arms together, under this plan's budget."""
        wanted = clock.settle_s if self.settle_s is None else self.settle_s
        if self.budget_s is None:
            return wanted
        return min(wanted, SETTLE_SHARE * self.budget_s)

    def quads_within(self, quad_s: float, spent_s: float, done: int) -> int:
        """Quads in all, when ``done`` are done, one takes ``quad_s`` and ``spent_s`` is spent.

        As many as the budget still holds, never under ``min_pairs`` or over ``pairs``.
        """
        least = min(self.quads, (self.min_pairs + 1) // 2)
        if self.budget_s is None:
            return self.quads
        more = int((self.budget_s - spent_s) / max(quad_s, 1e-9))
        return max(least, min(self.quads, done + max(0, more)))

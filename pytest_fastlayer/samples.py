"""Raw block times as they were measured, and the whole AB/BA quads that can be used of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pytest_fastlayer.records import Verdict

Array = NDArray[np.float64]

MIN_QUADS = 2  #: one quad has no scatter, hence no interval
MIN_STEPS = 20  #: a block must last this many steps of the timer (5% of reading error)


class SamplesError(ValueError):
    """Samples from which no speedup can be told; ``verdict`` is what the gate should say."""

    verdict: Verdict = Verdict.INCONCLUSIVE


class NoUsablePairsError(SamplesError):
    """Too few whole AB/BA quads are left after dropping pairs."""


class UnresolvableError(SamplesError):
    """The blocks last too few steps of the timer for a ratio to mean anything."""

    verdict = Verdict.UNRESOLVABLE


@dataclass(frozen=True)
class PairedSamples:
    """Raw block times in measured order; pair i is ``(reference_s[i], candidate_s[i])``.

    ``reference_s`` and ``candidate_s`` are seconds per forward, ``forwards`` the forwards in one
    block of the (reference, candidate), ``resolution_s`` the step of the timer in seconds.
    ``order`` says which arm of a pair ran first; two neighbours of different order form a quad.
    ``keep`` marks with False the pairs to drop (clock moved, throttled); None keeps all.

    Raises ValueError when lengths differ, an order is not "AB" or "BA", or a time is negative or
    not finite. A time of zero is accepted here: `summarize` reports it as unresolvable.
    """

    reference_s: tuple[float, ...]
    candidate_s: tuple[float, ...]
    order: tuple[str, ...]
    forwards: tuple[int, int]
    resolution_s: float
    keep: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        expected = len(self.reference_s)
        for name in ("candidate_s", "order", "keep"):
            given = getattr(self, name)
            if given is not None and len(given) != expected:
                raise ValueError(
                    f"{name} has {len(given)} entries but reference_s has {expected}: "
                    "give one entry per pair in each"
                )
        for i, order in enumerate(self.order):
            if order not in ("AB", "BA"):
                raise ValueError(f'order[{i}] is {order!r}: expected "AB" or "BA"')
        for name in ("reference_s", "candidate_s"):
            for i, seconds in enumerate(getattr(self, name)):
                if not 0 <= seconds < np.inf:
                    raise ValueError(
                        f"{name}[{i}] is {seconds}: expected finite seconds, zero or more"
                    )
        if min(self.forwards) < 1:
            raise ValueError(f"forwards is {self.forwards}: expected at least 1 for each arm")
        if not 0 <= self.resolution_s < np.inf:
            raise ValueError(f"resolution_s is {self.resolution_s}: expected finite seconds")

    def extended(self, other: PairedSamples) -> PairedSamples:
        """These samples followed by ``other``, which must hold the same forwards per block."""
        if self.forwards != other.forwards:
            raise ValueError(
                f"cannot extend blocks of {self.forwards} forwards by blocks of "
                f"{other.forwards}: measure the extension with the same forwards"
            )
        keep = None
        if self.keep is not None or other.keep is not None:
            keep = self.kept() + other.kept()
        return replace(
            self,
            reference_s=self.reference_s + other.reference_s,
            candidate_s=self.candidate_s + other.candidate_s,
            order=self.order + other.order,
            resolution_s=max(self.resolution_s, other.resolution_s),
            keep=keep,
        )

    def kept(self) -> tuple[bool, ...]:
        """``keep`` with its default filled in."""
        return self.keep if self.keep is not None else (True,) * len(self.order)

    def quads(self) -> list[int]:
        """Index of the first pair of each whole quad: neighbours of different order, both kept.

        Pairs are matched as they were measured, before anything is dropped, so that the two
        halves of a quad are always neighbours in time.
        """
        keep = self.kept()
        starts: list[int] = []
        i = 0
        while i + 1 < len(self.order):
            if self.order[i] == self.order[i + 1]:
                i += 1
                continue
            if keep[i] and keep[i + 1]:
                starts.append(i)
            i += 2
        return starts


@dataclass(frozen=True)
class Quads:
    """What is left of samples: whole quads in measured order, arrays of two pairs per quad."""

    reference_s: Array
    candidate_s: Array

    @property
    def log_ratios(self) -> Array:
        """ln(reference time / candidate time) of each pair."""
        # A difference of logarithms: the quotient itself could overflow.
        difference: Array = np.log(self.reference_s) - np.log(self.candidate_s)
        return difference

    @property
    def quad_ratios(self) -> Array:
        """Mean log-ratio of each quad."""
        pairs = self.log_ratios
        mean: Array = (pairs[0::2] + pairs[1::2]) / 2
        return mean

    @property
    def disagreements(self) -> Array:
        """Half the difference between the two log-ratios of each quad, without sign."""
        pairs = self.log_ratios
        half: Array = np.abs(pairs[0::2] - pairs[1::2]) / 2
        return half


def usable_quads(
    samples: PairedSamples, reasons: Sequence[str] = (), *, least: int = MIN_QUADS
) -> Quads:
    """The whole quads of ``samples``; ``reasons`` say why pairs were dropped, for the message.

    Raises `NoUsablePairsError` below ``least`` quads, `UnresolvableError` when an arm's median
    block lasts under 20 steps of the timer or a block lasts no time at all.
    """
    starts = samples.quads()
    if len(starts) < least:
        total, kept = len(samples.order), sum(samples.kept())
        because = f" ({'; '.join(reasons)})" if reasons else ""
        raise NoUsablePairsError(
            f"{len(starts)} whole AB/BA quads are usable, at least {least} are needed: "
            f"{total - kept} of {total} pairs were dropped{because}; lock the device's clocks, "
            "let it cool, stop other work on it, or measure more pairs"
        )
    index = np.array(starts)
    index = np.stack([index, index + 1], axis=1).ravel()
    usable = Quads(np.array(samples.reference_s)[index], np.array(samples.candidate_s)[index])
    arms = zip(
        ("reference", "candidate"),
        (usable.reference_s, usable.candidate_s),
        samples.forwards,
        strict=True,
    )
    for arm, seconds, forwards in arms:
        block = float(np.median(seconds)) * forwards
        if block < MIN_STEPS * samples.resolution_s or not seconds.min() > 0:
            raise UnresolvableError(
                f"a block of {forwards} forwards of the {arm} lasts {block:.3g} s "
                f"(shortest {seconds.min() * forwards:.3g} s) on a timer with steps of "
                f"{samples.resolution_s:.3g} s: expected at least {MIN_STEPS} steps; batch more "
                "forwards into a block (a larger block_ms) or time a larger workload"
            )
    return usable

"""Paired samples with known ratios, built rather than measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pytest_fastlayer.records import Method, Timing
from pytest_fastlayer.samples import PairedSamples
from pytest_fastlayer.statistics import summarize

METHOD = Method(clock="cpu_clock", settle_s=0, block_ms=50)


def samples(
    log_ratios: Sequence[float],
    *,
    candidate_s: float = 1e-3,
    forwards: tuple[int, int] = (20, 50),
    resolution_s: float = 1e-9,
    keep: Sequence[bool] | None = None,
    order: Sequence[str] | None = None,
) -> PairedSamples:
    """Pairs AB BA AB BA ... with these logarithms of reference over candidate time."""
    pairs = len(log_ratios)
    return PairedSamples(
        reference_s=tuple(candidate_s * math.exp(value) for value in log_ratios),
        candidate_s=(candidate_s,) * pairs,
        order=tuple(order)
        if order is not None
        else tuple(("AB", "BA")[i % 2] for i in range(pairs)),
        forwards=forwards,
        resolution_s=resolution_s,
        keep=tuple(keep) if keep is not None else None,
    )


def noisy(
    quads: int, *, speedup: float = 2.0, deviation: float = 0.005, seed: int = 0
) -> PairedSamples:
    rng = np.random.default_rng(seed)
    return samples((math.log(speedup) + rng.normal(0, deviation, 2 * quads)).tolist())


def timing(paired: PairedSamples, *, min_effect: float = 0.0, **more: object) -> Timing:
    return summarize(paired, method=METHOD, min_effect=min_effect, **more)  # type: ignore[arg-type]

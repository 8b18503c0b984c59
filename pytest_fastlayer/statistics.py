"""From raw paired block times to a speedup, its interval and its noise floor. Pure: no clock, no
torch; the same samples and seed give the same figures everywhere.

The unit of evidence is the *quad*: a pair measured in the order AB next to one measured BA (A the
reference, B the candidate). With ``d = ln(reference_s / candidate_s)`` of a pair,

    quad log-ratio        q = (d_AB + d_BA) / 2      a drift linear in log time cancels
    quad disagreement     h = |d_AB - d_BA| / 2      what the same quad could have said as well

    speedup   exp(median q): half of the quads may be disturbed before it follows them
    interval  of the median, over quads and never over single blocks, whose noise is correlated:
              the percentile bootstrap (Efron & Tibshirani 1993, ch. 13;
              ``scipy.stats.bootstrap``), made honest for small samples as said below
    floor     the largest of four sources; see `noise_floor`

**Few quads.** The percentile bootstrap of a median is too narrow for small samples. It cannot
reach beyond the extreme observations, so with n quads it misses at least 2**(1-n) of the time: half
the time for two, a quarter for three; up to twenty quads 6% to 8% were measured instead of 5%. So
it is joined with a second interval, and the wider end counts on each side:

- below `FEW_QUADS` Student's t interval of the quad log-ratios, ``mean ± t(1 - a/2, n - 1) * s /
  sqrt(n)`` (Student 1908). A disturbed quad then widens the interval instead of passing unseen,
  which is right when it may be one of three;
- from there on the distribution-free interval between the k-th smallest and the k-th largest quad,
  k the a/2 quantile of Binomial(n, 1/2) (Thompson 1936; David & Nagaraja 2003, sec. 7.1), which
  covers the median with at least the stated confidence whatever the noise looks like.

**Extensions.** A case is extended because its interval straddles the bar, so every extension is
one more look at the same question. After k extensions the interval is therefore taken at the
confidence ``1 - (1 - confidence) / 2**k``: the one-sided errors of all looks, 2.5% + 1.25% + ...,
sum to less than 5% by the union bound, however often one looks (measured in ``tests/statistics``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from pytest_fastlayer import records
from pytest_fastlayer.samples import (
    MIN_QUADS,
    Array,
    NoUsablePairsError,
    PairedSamples,
    Quads,
    SamplesError,
    UnresolvableError,
    usable_quads,
)

__all__ = [
    "NoUsablePairsError",
    "PairedSamples",
    "SamplesError",
    "UnresolvableError",
    "combined_floor",
    "compare_ratio",
    "holm",
    "interval",
    "minimum_detectable_effect",
    "noise_floor",
    "summarize",
    "summarize_control",
]

CONFIDENCE = 0.95  #: two-sided, of every interval that a record stores
RESAMPLES = 2000  #: bootstrap resamples; the tail of 2.5% rests on fifty of them
FEW_QUADS = 12  #: below this the Student interval is joined to the bootstrap
DISAGREEMENT_QUANTILE = 0.75  #: three quads of four agree with themselves within the floor
POWER = 0.8  #: chance of detection that defines the minimum detectable effect
DRIFT_WARNING = 0.1  #: first against last quarter of the reference's blocks


#: Largest logarithm that is turned back into a ratio. An interval of two wildly different quads
#: may reach beyond what a float holds; its end is then this far out, and finite.
LOG_LIMIT = 700.0


def _exp(logarithm: float) -> float:
    return float(np.exp(np.clip(logarithm, -LOG_LIMIT, LOG_LIMIT)))


def _fraction(logarithm: float) -> float:
    """A logarithm, zero or more, as the fraction above 1: 0.0953 -> 0.1."""
    return float(np.expm1(min(logarithm, LOG_LIMIT)))


def _level(confidence: float, extensions: int) -> float:
    """Confidence of an interval after so many extensions; see the module's docstring."""
    return 1 - (1 - confidence) * 0.5**extensions


def interval(values: Array, level: float = CONFIDENCE, *, seed: int = 0) -> tuple[float, float]:
    """Two-sided interval of the median of ``values`` (1-D, one per quad, at least two).

    In the unit of ``values``: the hull of the percentile bootstrap and, below `FEW_QUADS` values,
    Student's t interval of the mean, else the interval between two order statistics. Sources in
    the module's docstring.
    """
    result = stats.bootstrap(
        (values,),
        np.median,
        n_resamples=RESAMPLES,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    n = len(values)
    if n < FEW_QUADS:
        center = float(values.mean())
        half = float(stats.t.ppf((1 + level) / 2, n - 1) * values.std(ddof=1) / np.sqrt(n))
        low, high = center - half, center + half
    else:
        ordered = np.sort(values)
        k = int(stats.binom.ppf((1 - level) / 2, n, 0.5))
        low, high = float(ordered[k - 1]), float(ordered[n - k])
    # Rounding alone may put an end of a zero-width interval past the point it surrounds.
    median = float(np.median(values))
    return min(low, float(result.low), median), max(high, float(result.high), median)


def noise_floor(
    samples: PairedSamples, usable: Quads, control: records.Control | None, min_effect: float
) -> records.NoiseFloor:
    """The four sources, as fractions; the floor is the largest (`NoiseFloor.value`).

    - within_quad: the upper quartile of the quads' disagreements. It says how far a typical quad
      contradicts itself, and does not shrink with more pairs as the interval does: an interval
      measures repeatability within the run, not the bias of the run. A quartile, not a higher
      quantile: 1% of disturbed blocks disturb 4% of the quads, and of fifty quads a tenth is
      disturbed often enough to cost one detection in ten (see the method table).
    - control: how far the A/A control of the same run came out from 1.
    - resolution: one step of the timer in each arm's block, both in the worst direction.
    - min_effect: the smallest effect that the user cares for.
    """
    blocks = (
        float(np.median(usable.reference_s)) * samples.forwards[0],
        float(np.median(usable.candidate_s)) * samples.forwards[1],
    )
    disagreement = float(np.quantile(usable.disagreements, DISAGREEMENT_QUANTILE))
    return records.NoiseFloor(
        within_quad=_fraction(disagreement),
        control=_fraction(abs(np.log(control.speedup))) if control else 0.0,
        resolution=sum(samples.resolution_s / block for block in blocks),
        min_effect=min_effect,
    )


def summarize_control(
    samples: PairedSamples, arm: Literal["reference", "candidate"], *, seed: int = 0
) -> records.Control:
    """The A/A control: one arm in the place of both. Raises `SamplesError` as `summarize` does."""
    quads = usable_quads(samples).quad_ratios
    low, high = interval(quads, seed=seed)
    return records.Control(
        arm=arm,
        speedup=_exp(np.median(quads)),
        ci=(_exp(low), _exp(high)),
        pairs=2 * len(quads),
    )


def summarize(
    samples: PairedSamples,
    *,
    control: PairedSamples | None = None,
    control_arm: Literal["reference", "candidate"] = "reference",
    method: records.Method,
    min_effect: float,
    confidence: float = CONFIDENCE,
    seed: int = 0,
    extensions: int = 0,
    dropped_reasons: Sequence[str] = (),
    clocks: records.Clocks | None = None,
    warnings: Sequence[str] = (),
    diagnostic: bool = False,
) -> records.Timing:
    """Speedup (reference time over candidate time), interval, floor and detectable effect.

    ``control`` is the A/A control, ``control_arm`` timed against itself; ``min_effect`` a
    fraction; ``extensions`` how often ``samples`` was already extended. ``dropped_reasons``,
    ``clocks`` and ``warnings`` are passed on into the record. A ``diagnostic`` ratio claims
    nothing: one quad will do, and it has neither interval nor detectable effect; the candidate's
    seconds are then the median of its control's blocks, of which there are more.

    Raises `NoUsablePairsError` when fewer than two whole quads (one) are left, `UnresolvableError`
    when blocks last under 20 steps of the timer; the errors' ``verdict`` says what the gate
    should make of them.
    """
    usable = usable_quads(samples, dropped_reasons, least=1 if diagnostic else MIN_QUADS)
    quads = usable.quad_ratios
    notes = [*warnings, *(() if diagnostic else _warnings(samples, usable))]
    control_record = None
    if control is not None:
        try:
            control_record = summarize_control(control, control_arm, seed=seed)
        except SamplesError as error:
            notes.append(f"the A/A control could not be used: {error}")
        else:
            notes += _control_warnings(control_record)
    ci = None
    if not diagnostic:
        low, high = interval(quads, _level(confidence, extensions), seed=seed)
        ci = (_exp(low), _exp(high))
    candidate_s = usable.candidate_s
    if diagnostic and control_record is not None and control_arm == "candidate":
        assert control is not None  # or it would have no record
        alone = usable_quads(control)
        candidate_s = np.concatenate([alone.reference_s, alone.candidate_s])
    floor = noise_floor(samples, usable, control_record, min_effect)
    timing = records.Timing(
        method=method,
        reference_s=float(np.median(usable.reference_s)),
        candidate_s=float(np.median(candidate_s)),
        speedup=_exp(np.median(quads)),
        ci=ci,
        noise_floor=floor.value,
        floor_sources=floor,
        aa=control_record,
        pairs=2 * len(quads),
        dropped_pairs=len(samples.order) - 2 * len(quads),
        dropped_reasons=tuple(dropped_reasons),
        extensions=extensions,
        forwards_per_block=records.ForwardsPerBlock(
            reference=samples.forwards[0], candidate=samples.forwards[1]
        ),
        clocks=clocks,
        log_ratios=tuple(usable.log_ratios.tolist()),
        warnings=tuple(notes),
    )
    if diagnostic:
        return timing
    effect = minimum_detectable_effect(timing, confidence=confidence)
    return timing.model_copy(update={"min_detectable_effect": effect})


def _warnings(samples: PairedSamples, usable: Quads) -> list[str]:
    found = []
    quads = len(usable.reference_s) // 2
    if quads < FEW_QUADS:
        found.append(
            f"only {quads} AB/BA quads: the interval is Student's t, wide on purpose; "
            "allow the case more time for a tighter one"
        )
    halves = sum(samples.kept()) - 2 * quads
    if halves:
        found.append(f"{halves} kept pairs had lost the other half of their quad and were left out")
    quarter = quads // 2  # pairs: half a quad each
    first = float(np.median(usable.reference_s[:quarter]))
    last = float(np.median(usable.reference_s[-quarter:]))
    drift = max(first, last) / min(first, last) - 1
    if drift > DRIFT_WARNING:
        found.append(
            f"the reference drifted by {drift:.0%} from the first to the last quarter: "
            "settle longer (settle_s) or lock the clocks; pairing cancels it, milliseconds do not"
        )
    return found


def _control_warnings(control: records.Control) -> list[str]:
    if control.ci is None or control.ci[0] <= 1 <= control.ci[1]:
        return []
    return [
        f"the A/A control of the {control.arm} came out at {control.speedup:.3f}x "
        f"[{control.ci[0]:.3f}, {control.ci[1]:.3f}], without 1: the floor was raised to cover it"
    ]


@dataclass(frozen=True)
class _Scale:
    """Standard errors of a log speedup, downward and upward, with their degrees of freedom."""

    down: float
    up: float
    freedom: int


def _scale(timing: records.Timing, confidence: float = CONFIDENCE) -> _Scale:
    """Standard errors recovered from the stored interval (MOVER: Zou & Donner 2008).

    A published figure has no interval: its noise floor stands in as the half-width.
    """
    freedom = max(1, timing.pairs // 2 - 1)
    if timing.ci is None:
        down = up = float(np.log1p(timing.noise_floor))
    else:
        point = np.log(timing.speedup)
        down = max(0.0, float(point - np.log(timing.ci[0])))
        up = max(0.0, float(np.log(timing.ci[1]) - point))
    quantile = float(stats.t.ppf((1 + _level(confidence, timing.extensions)) / 2, freedom))
    return _Scale(down / quantile, up / quantile, freedom)


def _combine(a: float, a_freedom: int, b: float, b_freedom: int) -> tuple[float, float]:
    """Standard error of a difference and its degrees of freedom (Welch 1947, Satterthwaite)."""
    total = float(np.hypot(a, b))
    if total == 0:
        return 0.0, float(a_freedom + b_freedom)
    # Shares of the variance, not the variances: their squares cannot underflow.
    x, y = (a / total) ** 2, (b / total) ** 2
    return total, 1 / (x**2 / a_freedom + y**2 / b_freedom)


def combined_floor(timing: records.Timing, baseline: records.Timing) -> float:
    """Noise floor of the ratio of two measurements: the floors add in quadrature.

    Each floor bounds the error of its own session, and the sessions err independently. In the
    logarithm, so that exchanging the two changes nothing.
    """
    return _fraction(np.hypot(np.log1p(timing.noise_floor), np.log1p(baseline.noise_floor)))


def compare_ratio(
    timing: records.Timing,
    baseline: records.Timing,
    *,
    baseline_path: str = "",
    provenance: Literal["measured", "published"] = "measured",
    changed_since: Sequence[str] = (),
    confidence: float = CONFIDENCE,
) -> records.Comparison:
    """The speedup now over the stored speedup; below 1 is slower.

    ``threshold`` is the combined noise floor; ``p_value`` is one-sided, of the hypothesis that
    the drop lies within it: Welch's t of ``(-ln ratio - ln(1 + threshold)) / standard error``.
    The hypothesis that a *gain* lies within it has the p-value of the exchanged comparison.
    """
    now, then = _scale(timing, confidence), _scale(baseline, confidence)
    log_ratio = float(np.log(timing.speedup) - np.log(baseline.speedup))
    threshold = combined_floor(timing, baseline)
    up, up_freedom = _combine(now.up, now.freedom, then.down, then.freedom)
    down, down_freedom = _combine(now.down, now.freedom, then.up, then.freedom)
    tail = (1 + confidence) / 2
    excess = -log_ratio - float(np.log1p(threshold))
    # Without scatter the statistic is infinite, on the side of the excess.
    statistic = excess / up if up > 0 else np.copysign(np.inf, excess)
    p_value = float(stats.t.sf(statistic, up_freedom))
    return records.Comparison(
        baseline=baseline_path,
        provenance=provenance,
        ratio=_exp(log_ratio),
        ci=(
            _exp(log_ratio - stats.t.ppf(tail, down_freedom) * down),
            _exp(log_ratio + stats.t.ppf(tail, up_freedom) * up),
        ),
        threshold=threshold,
        p_value=p_value,
        changed_since=tuple(changed_since),
    )


def minimum_detectable_effect(
    timing: records.Timing,
    baseline: records.Timing | None = None,
    *,
    confidence: float = CONFIDENCE,
    power: float = POWER,
) -> float:
    """The slowdown, as a fraction, that the gate would find with the given power.

    Of a single case against ``baseline``, by default one measured as well as this:
    ``ln(1 + combined floor) + (t(1 - a/2) + t(power)) * standard error of the difference``
    (Cohen 1988, ch. 2, with the floor as the null hypothesis' edge). A candidate that takes
    ``1 + effect`` times as long is called SLOWER with that probability.
    """
    now, then = _scale(timing, confidence), _scale(baseline or timing, confidence)
    error, freedom = _combine(now.up, now.freedom, then.down, then.freedom)
    quantiles = float(stats.t.ppf((1 + confidence) / 2, freedom) + stats.t.ppf(power, freedom))
    floor = float(np.log1p(combined_floor(timing, baseline or timing)))
    return _fraction(floor + quantiles * error)


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Which hypotheses Holm's step-down procedure rejects at family-wise level ``alpha``.

    In the order given (Holm 1979): the k-th smallest p-value, k = 0.., is rejected while every
    smaller one was and it is at most ``alpha / (m - k)``.
    """
    rejected = [False] * len(p_values)
    for k, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[i] > alpha / (len(p_values) - k):
            break
        rejected[i] = True
    return rejected

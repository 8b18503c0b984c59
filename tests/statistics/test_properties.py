"""What holds for all samples: no unit, arm or order is special, and no NaN comes out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statistics_makers import METHOD, samples, timing

from pytest_fastlayer.records import Timing
from pytest_fastlayer.samples import PairedSamples, SamplesError
from pytest_fastlayer.statistics import combined_floor, compare_ratio, holm, summarize

SECONDS = st.floats(1e-7, 10.0)
LOG_RATIO = st.floats(-3, 3)
EXAMPLES = settings(max_examples=40, deadline=None)


@st.composite
def whole_quads(draw: st.DrawFn, most: int = 14) -> PairedSamples:
    """Two to ``most`` quads with any positive times whatever, by a perfect timer."""
    pairs = 2 * draw(st.integers(2, most))
    times = st.lists(SECONDS, min_size=pairs, max_size=pairs).map(tuple)
    forwards = draw(st.tuples(st.integers(1, 100), st.integers(1, 100)))
    return PairedSamples(draw(times), draw(times), ("AB", "BA") * (pairs // 2), forwards, 0.0)


@st.composite
def any_samples(draw: st.DrawFn) -> PairedSamples:
    """Any samples that construct: zeros, odd lengths, dropped pairs, coarse timers."""
    pairs = draw(st.integers(0, 9))
    size = {"min_size": pairs, "max_size": pairs}
    times = st.lists(st.floats(0, 1e300), **size).map(tuple)
    return PairedSamples(
        draw(times),
        draw(times),
        draw(st.lists(st.sampled_from(["AB", "BA"]), **size).map(tuple)),
        draw(st.tuples(st.integers(1, 100), st.integers(1, 100))),
        draw(st.floats(0, 1e3)),
        draw(st.none() | st.lists(st.booleans(), **size).map(tuple)),
    )


@st.composite
def timings(draw: st.DrawFn) -> Timing:
    speedup = draw(st.floats(0.01, 100))
    down, up = draw(st.floats(0, 1)), draw(st.floats(0, 1))
    ci = (speedup * math.exp(-down), speedup * math.exp(up))
    return Timing(
        method=METHOD,
        reference_s=1,
        candidate_s=1,
        speedup=speedup,
        ci=draw(st.sampled_from([ci, None])),
        noise_floor=draw(st.floats(0, 1)),
        pairs=draw(st.integers(0, 500)),
        extensions=draw(st.integers(0, 4)),
    )


def swapped(paired: PairedSamples) -> PairedSamples:
    """The same measurement with the arms' names exchanged."""
    return replace(
        paired,
        reference_s=paired.candidate_s,
        candidate_s=paired.reference_s,
        order=tuple(order[::-1] for order in paired.order),
        forwards=paired.forwards[::-1],
    )


def scaled(paired: PairedSamples, reference: float, candidate: float) -> PairedSamples:
    return replace(
        paired,
        reference_s=tuple(reference * t for t in paired.reference_s),
        candidate_s=tuple(candidate * t for t in paired.candidate_s),
    )


@EXAMPLES
@given(whole_quads(), st.floats(0.01, 100))
def test_the_unit_of_time_does_not_matter(paired: PairedSamples, unit: float) -> None:
    one, other = timing(paired), timing(scaled(paired, unit, unit))
    assert other.speedup == pytest.approx(one.speedup)
    assert other.ci == pytest.approx(one.ci)
    assert other.noise_floor == pytest.approx(one.noise_floor, rel=1e-6, abs=1e-12)
    assert other.reference_s == pytest.approx(unit * one.reference_s)


@EXAMPLES
@given(whole_quads(), st.floats(0.01, 100))
def test_a_slower_candidate_moves_the_speedup_by_just_that(
    paired: PairedSamples, factor: float
) -> None:
    one, other = timing(paired), timing(scaled(paired, 1, factor))
    assert other.speedup == pytest.approx(one.speedup / factor)
    assert other.ci is not None
    assert one.ci is not None
    assert other.ci == pytest.approx([end / factor for end in one.ci])
    assert other.noise_floor == pytest.approx(one.noise_floor, rel=1e-6, abs=1e-12)
    assert other.min_detectable_effect == pytest.approx(one.min_detectable_effect)


@EXAMPLES
@given(whole_quads())
def test_exchanging_the_arms_inverts_the_speedup(paired: PairedSamples) -> None:
    one, other = timing(paired), timing(swapped(paired))
    assert one.ci is not None
    assert other.speedup == pytest.approx(1 / one.speedup)
    assert other.ci == pytest.approx((1 / one.ci[1], 1 / one.ci[0]))
    assert other.noise_floor == pytest.approx(one.noise_floor)


@EXAMPLES
@given(whole_quads(), st.data())
def test_the_order_of_the_quads_does_not_move_point_or_floor(
    paired: PairedSamples, data: st.DataObject
) -> None:
    quads = data.draw(st.permutations(range(len(paired.order) // 2)))
    index = [2 * q + half for q in quads for half in (0, 1)]
    shuffled = replace(
        paired,
        reference_s=tuple(paired.reference_s[i] for i in index),
        candidate_s=tuple(paired.candidate_s[i] for i in index),
    )
    one, other = timing(paired), timing(shuffled)
    assert (other.speedup, other.noise_floor) == pytest.approx((one.speedup, one.noise_floor))


@EXAMPLES
@given(any_samples(), any_samples(), st.floats(0, 1))
def test_every_sample_gives_finite_figures_or_a_named_error(
    paired: PairedSamples, control: PairedSamples, min_effect: float
) -> None:
    """The record itself refuses NaN and infinity; what else may come is a `SamplesError`."""
    try:
        got = summarize(paired, control=control, method=METHOD, min_effect=min_effect)
    except SamplesError:
        return
    assert got.ci is not None
    assert got.ci[0] <= got.speedup <= got.ci[1]
    assert got.noise_floor >= min_effect


@EXAMPLES
@given(st.lists(LOG_RATIO, min_size=4, max_size=24), st.floats(0, 0.5), st.floats(0, 0.5))
def test_floor_is_monotonic_in_the_minimum_effect(
    ratios: list[float], one: float, other: float
) -> None:
    low, high = sorted((one, other))
    paired = samples(ratios)
    assert timing(paired, min_effect=low).noise_floor <= timing(paired, min_effect=high).noise_floor


@EXAMPLES
@given(timings(), timings())
def test_comparison_is_finite_ordered_and_mirrors(now: Timing, then: Timing) -> None:
    got, back = compare_ratio(now, then), compare_ratio(then, now)
    assert got.ci is not None
    assert back.ci is not None
    assert got.ci[0] <= got.ratio * (1 + 1e-12)
    assert got.ratio <= got.ci[1] * (1 + 1e-12)
    assert back.ratio == pytest.approx(1 / got.ratio)
    assert back.ci == pytest.approx((1 / got.ci[1], 1 / got.ci[0]))
    assert back.threshold == got.threshold == combined_floor(now, then)
    assert got.threshold >= max(now.noise_floor, then.noise_floor) * (1 - 1e-12)


@EXAMPLES
@given(timings(), timings(), st.floats(0.5, 1))
def test_slower_is_never_less_significant(now: Timing, then: Timing, factor: float) -> None:
    ci = now.ci and (now.ci[0] * factor, now.ci[1] * factor)
    slower = now.model_copy(update={"speedup": now.speedup * factor, "ci": ci})
    assert compare_ratio(slower, then).p_value <= compare_ratio(now, then).p_value + 1e-9


@EXAMPLES
@given(timings(), timings(), st.floats(0, 1))
def test_a_higher_floor_is_never_more_significant(now: Timing, then: Timing, more: float) -> None:
    noisier = now.model_copy(update={"noise_floor": now.noise_floor + more})
    if now.ci is not None:  # without an interval the floor is the half-width as well
        assert compare_ratio(noisier, then).p_value >= compare_ratio(now, then).p_value - 1e-9
    assert combined_floor(noisier, then) >= combined_floor(now, then)


@EXAMPLES
@given(st.lists(st.floats(0, 1), max_size=30), st.floats(0.001, 0.5))
def test_holm_lies_between_bonferroni_and_no_correction(
    p_values: list[float], alpha: float
) -> None:
    rejected = holm(p_values, alpha)
    assert len(rejected) == len(p_values)
    for p, verdict in zip(p_values, rejected, strict=True):
        assert verdict >= (p <= alpha / len(p_values))
        assert verdict <= (p <= alpha)
    kept = [p for p, verdict in zip(p_values, rejected, strict=True) if not verdict]
    gone = [p for p, verdict in zip(p_values, rejected, strict=True) if verdict]
    assert not kept or not gone or max(gone) <= min(kept)

"""From samples to a timing, and from two timings to a comparison: figures known beforehand."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from scipy import stats
from statistics_makers import METHOD, noisy, samples, timing

from pytest_fastlayer import statistics
from pytest_fastlayer.records import Clocks, Control, Method, Timing
from pytest_fastlayer.samples import NoUsablePairsError
from pytest_fastlayer.statistics import (
    compare_ratio,
    holm,
    interval,
    minimum_detectable_effect,
    summarize,
    summarize_control,
)


def made(speedup: float, half: float, *, pairs: int = 100, floor: float = 0.0, **more: object):
    """A timing whose log interval is ``±half`` about its speedup."""
    fields = {
        "method": METHOD,
        "reference_s": speedup,
        "candidate_s": 1.0,
        "speedup": speedup,
        "ci": (speedup * math.exp(-half), speedup * math.exp(half)),
        "noise_floor": floor,
        "pairs": pairs,
    }
    return Timing.model_validate(fields | more)


class TestPoint:
    def test_is_the_median_over_quads_not_over_pairs(self) -> None:
        # Quad means 0.5, 0.1, 0.2; the median of the six pairs would be 0.15.
        got = timing(samples([1.0, 0.0, 0.1, 0.1, 0.2, 0.2]))
        assert got.speedup == pytest.approx(math.exp(0.2))

    def test_log_linear_drift_cancels_exactly(self) -> None:
        blocks = 1e-3 * 1.01 ** np.arange(40).reshape(-1, 4)
        drifting = statistics.PairedSamples(
            reference_s=tuple((2 * blocks[:, [0, 3]]).ravel()),
            candidate_s=tuple(blocks[:, [1, 2]].ravel()),
            order=("AB", "BA") * 10,
            forwards=(1, 1),
            resolution_s=0.0,
        )
        got = timing(drifting)
        assert got.speedup == pytest.approx(2.0, rel=1e-12)
        assert got.ci == pytest.approx((2.0, 2.0), rel=1e-12)
        assert got.noise_floor == pytest.approx(0.01, rel=1e-9)

    def test_an_advantage_of_running_first_cancels_and_shows_as_floor(self) -> None:
        got = timing(samples([math.log(2) + 0.05, math.log(2) - 0.05] * 30))
        assert got.speedup == pytest.approx(2.0)
        assert got.floor_sources is not None
        assert got.floor_sources.within_quad == pytest.approx(math.expm1(0.05))

    def test_seconds_are_medians_of_the_pairs_used(self) -> None:
        keep = [True] * 4 + [False] * 2
        got = timing(samples([0.0, 0.1, 0.2, 0.3, 5.0, 5.0], keep=keep))
        assert got.candidate_s == pytest.approx(1e-3)
        assert got.reference_s == pytest.approx(1e-3 * (math.exp(0.1) + math.exp(0.2)) / 2)
        assert got.log_ratios == pytest.approx((0.0, 0.1, 0.2, 0.3))
        assert (got.pairs, got.dropped_pairs) == (4, 2)


class TestRecord:
    def test_carries_what_it_was_given(self) -> None:
        clocks = Clocks(sm_mhz_min=1, sm_mhz_max=2)
        got = timing(
            noisy(20), clocks=clocks, dropped_reasons=["hot"], warnings=["mind"], extensions=3
        )
        assert got.method == METHOD
        assert got.clocks == clocks
        assert got.dropped_reasons == ("hot",)
        assert got.warnings == ("mind",)
        assert got.extensions == 3
        assert got.forwards_per_block is not None
        assert got.forwards_per_block.reference == 20
        assert got.forwards_per_block.candidate == 50
        assert got.min_detectable_effect == minimum_detectable_effect(got)

    def test_defaults(self) -> None:
        paired, control = noisy(250), noisy(250, speedup=1.0, seed=9)
        got = timing(paired, control=control)
        assert got == timing(
            paired,
            control=control,
            control_arm="reference",
            seed=0,
            extensions=0,
            confidence=0.95,
            clocks=None,
            warnings=(),
            dropped_reasons=(),
        )
        assert got.aa == summarize_control(control, "reference")
        assert (got.extensions, got.clocks, got.dropped_reasons) == (0, None, ())

    def test_confidence_is_of_the_interval_and_of_the_effect(self) -> None:
        paired = noisy(30)
        got = timing(paired, confidence=0.8)
        quads = np.array(got.log_ratios).reshape(-1, 2).mean(axis=1)
        assert got.ci == pytest.approx(tuple(math.exp(end) for end in interval(quads, 0.8)))
        assert got.min_detectable_effect == minimum_detectable_effect(got, confidence=0.8)
        assert got.min_detectable_effect != minimum_detectable_effect(got)

    def test_quads_that_differ_beyond_any_float_stay_finite(self) -> None:
        for sign in (1, -1):
            ratios = [sign * 100.0, sign * 100.0, sign * 300.0, sign * 300.0]
            got = timing(samples(ratios, resolution_s=0.0))
            assert got.ci == pytest.approx((math.exp(-700), math.exp(700)))
            assert got.speedup == pytest.approx(math.exp(sign * 200))
            assert got.min_detectable_effect is not None
            assert math.isfinite(got.min_detectable_effect)
        got = timing(samples([705.0, -705.0] * 2, resolution_s=0.0))
        assert got.noise_floor == pytest.approx(math.expm1(700))

    def test_same_seed_same_figures(self) -> None:
        paired, control = noisy(250), noisy(250, speedup=1.0, seed=9)
        assert timing(paired, seed=3) == timing(paired, seed=3)
        seen = [timing(paired, control=control, seed=seed) for seed in range(8)]
        assert len({got.ci for got in seen}) > 1
        assert len({got.aa.ci for got in seen if got.aa}) > 1

    def test_fast_enough_to_run_after_every_case(self) -> None:
        """Under 50 ms with its control, and with every extension; the best of three is judged."""
        for quads in (50, 250):
            paired, control = noisy(quads), noisy(25, speedup=1.0)
            spent = []
            for _ in range(3):
                start = time.process_time()
                timing(paired, control=control)
                spent.append(time.process_time() - start)
            assert min(spent) < 0.05

    def test_too_few_quads_say_why(self) -> None:
        with pytest.raises(NoUsablePairsError, match=r"dropped \(throttled\)"):
            timing(samples([0.0] * 4, keep=[False] * 4), dropped_reasons=["throttled"])


class TestInterval:
    @pytest.mark.parametrize("quads", [2, 3, 4, 11])
    def test_student_with_few_quads(self, quads: int) -> None:
        values = np.random.default_rng(1).normal(0, 1, quads)
        half = stats.t.ppf(0.975, quads - 1) * values.std(ddof=1) / math.sqrt(quads)
        low, high = interval(values)
        assert low <= values.mean() - half + 1e-12
        assert high >= values.mean() + half - 1e-12
        if quads < 5:
            assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half))

    def test_the_wider_of_the_two(self) -> None:
        """Where Student's is the narrower side, the bootstrap's end stands."""
        values = np.array([0.0] * 5 + [1.0] * 4)
        half = stats.t.ppf(0.975, 8) * values.std(ddof=1) / 3
        low, high = interval(values)
        assert values.mean() + half < 1
        assert (low, high) == pytest.approx((min(0.0, values.mean() - half), 1.0))

    def test_an_outlier_reaches_the_interval_of_few_quads_only(self) -> None:
        values = np.array([*np.linspace(-0.01, 0.01, 11), 50.0])
        low, high = interval(values)
        assert -0.011 < low < 0 < high < 0.011
        assert interval(values[1:])[1] > 5

    @pytest.mark.parametrize(("quads", "k"), [(12, 3), (20, 6), (25, 8), (51, 19)])
    def test_reaches_the_order_statistics(self, quads: int, k: int) -> None:
        """k from the table of the sign test's 95% intervals (Conover 1999, table A3)."""
        values = np.random.default_rng(4).permutation(np.arange(1.0, quads + 1) ** 2)
        low, high = interval(values)
        assert low <= k**2
        assert high >= (quads + 1 - k) ** 2
        assert low >= (k - 1) ** 2
        assert high <= (quads + 2 - k) ** 2

    @pytest.mark.parametrize(("quads", "seed"), [(8, 0), (10, 1), (250, 0), (250, 3)])
    def test_is_the_hull_of_the_two(self, quads: int, seed: int) -> None:
        values = np.random.default_rng(seed).normal(0, 1, quads)
        bootstrap = stats.bootstrap(
            (values,),
            np.median,
            n_resamples=2000,
            confidence_level=0.9,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval
        if quads < 12:
            half = stats.t.ppf(0.95, quads - 1) * values.std(ddof=1) / math.sqrt(quads)
            other = values.mean() - half, values.mean() + half
        else:
            k = int(stats.binom.ppf(0.05, quads, 0.5))
            ordered = np.sort(values)
            other = ordered[k - 1], ordered[-k]
        expected = min(bootstrap.low, other[0]), max(bootstrap.high, other[1])
        assert interval(values, 0.9, seed=seed) == pytest.approx(expected)
        mirrored = tuple(-end for end in reversed(expected))
        assert interval(-values, 0.9, seed=seed) == pytest.approx(mirrored)

    def test_the_default_seed_is_zero(self) -> None:
        drawn = [np.random.default_rng(i).normal(0, 1, 250) for i in range(5)]
        assert [interval(x) for x in drawn] == [interval(x, seed=0) for x in drawn]
        assert [interval(x) for x in drawn] != [interval(x, seed=1) for x in drawn]

    def test_level_widens(self) -> None:
        values = np.random.default_rng(2).normal(0, 1, 30)
        narrow, wide = interval(values, 0.8), interval(values, 0.99)
        assert wide[0] < narrow[0] < narrow[1] < wide[1]

    def test_no_scatter_is_a_point_and_no_nan(self) -> None:
        for quads in (2, 3, 50):
            assert interval(np.full(quads, 0.1)) == pytest.approx((0.1, 0.1))
            low, high = interval(np.full(quads, 0.1))
            assert low <= 0.1 <= high

    @pytest.mark.parametrize(
        ("quads", "worst"), [(2, 0.08), (3, 0.08), (4, 0.08), (12, 0.08), (50, 0.08)]
    )
    def test_misses_the_truth_as_seldom_as_it_says(self, quads: int, worst: float) -> None:
        """5% nominal; 250 trials have a standard error of 1.4%. Heavy tails are included."""
        rng = np.random.default_rng(5)
        for draw in (rng.standard_normal, lambda n: rng.standard_t(2, n)):
            ends = np.array([interval(draw(quads), seed=i) for i in range(250)])
            misses = np.mean((ends[:, 0] > 0) | (ends[:, 1] < 0))
            assert misses <= worst

    def test_a_bootstrap_alone_would_be_dishonest_with_three_quads(self) -> None:
        """What the docstring says of it: it misses a quarter of the time."""
        rng = np.random.default_rng(5)
        misses = 0
        for _ in range(300):
            alone = stats.bootstrap(
                (rng.standard_normal(3),), np.median, n_resamples=999, method="percentile", rng=rng
            ).confidence_interval
            misses += not alone.low <= 0 <= alone.high
        assert misses / 300 == pytest.approx(0.25, abs=0.07)

    def test_each_extension_is_a_further_look_at_a_higher_confidence(self) -> None:
        paired = noisy(30)
        quads = np.array(timing(paired).log_ratios).reshape(-1, 2).mean(axis=1)
        for extensions, level in ((0, 0.95), (1, 0.975), (4, 0.996875)):
            expected = tuple(math.exp(end) for end in interval(quads, level))
            assert timing(paired, extensions=extensions).ci == pytest.approx(expected)


class TestFloor:
    def test_each_source_and_the_largest_wins(self) -> None:
        ratios = [0.02, 0.0] * 20
        got = timing(samples(ratios, resolution_s=1e-4), min_effect=0.004)
        sources = got.floor_sources
        assert sources is not None
        assert sources.within_quad == pytest.approx(math.expm1(0.01))
        block = 1e-3 * (math.exp(0.02) + 1) / 2 * 20, 1e-3 * 50
        assert sources.resolution == pytest.approx(1e-4 / block[0] + 1e-4 / block[1])
        assert sources.min_effect == 0.004
        assert sources.control == 0
        assert got.noise_floor == sources.value == pytest.approx(math.expm1(0.01))
        assert timing(samples(ratios), min_effect=0.3).noise_floor == 0.3

    def test_within_quad_is_the_upper_quartile(self) -> None:
        ratios = [value for h in (0.01, 0.02, 0.03, 0.04, 0.9) for value in (h, -h)]
        sources = timing(samples(ratios)).floor_sources
        assert sources is not None
        assert sources.within_quad == pytest.approx(math.expm1(0.04))

    @pytest.mark.parametrize("aside", [1.1, 1 / 1.1])
    def test_control_counts_in_either_direction(self, aside: float) -> None:
        control = noisy(20, speedup=aside, deviation=0.0)
        got = timing(noisy(20), control=control, control_arm="candidate")
        assert got.noise_floor == pytest.approx(0.1)
        assert got.aa is not None
        assert got.aa.arm == "candidate"
        assert got.aa.speedup == pytest.approx(aside)
        assert got.aa.pairs == 40
        assert any("the floor was raised" in warning for warning in got.warnings)
        told = f"the A/A control of the candidate came out at {aside:.3f}x "
        told += f"[{aside:.3f}, {aside:.3f}], without 1: the floor was raised to cover it"
        assert told in got.warnings

    def test_control_interval_is_told_from_low_to_high(self) -> None:
        got = timing(noisy(20), control=noisy(20, speedup=1.5, deviation=0.05))
        assert got.aa is not None
        assert got.aa.ci is not None
        low, high = got.aa.ci
        assert f"{low:.3f}" != f"{high:.3f}"
        assert f"[{low:.3f}, {high:.3f}], without 1" in got.warnings[-1]

    def test_control_of_exactly_one_is_no_warning(self) -> None:
        assert timing(noisy(20), control=samples([0.0] * 40)).warnings == ()

    def test_warnings_of_samples_and_control_stand_together(self) -> None:
        got = timing(noisy(4), control=noisy(20, speedup=1.5), warnings=["mind"])
        assert len(got.warnings) == 3
        assert got.warnings[0] == "mind"

    def test_control_within_its_interval_is_no_warning(self) -> None:
        got = timing(noisy(20), control=noisy(20, speedup=1.0, seed=3))
        assert got.aa is not None
        assert got.aa.arm == "reference"
        assert got.aa.ci is not None
        assert got.aa.ci[0] < 1 < got.aa.ci[1]
        assert got.warnings == ()

    def test_unusable_control_is_said_and_the_case_still_judged(self) -> None:
        got = timing(noisy(20), control=samples([0.0] * 4, keep=[False] * 4))
        assert got.aa is None
        assert "the A/A control could not be used: 0 whole" in got.warnings[0]

    def test_control_alone_is_a_record(self) -> None:
        quads = np.array([0.01, 0.02, 0.03])
        got = summarize_control(samples(np.repeat(quads, 2).tolist()), "reference")
        low, high = interval(quads)
        assert got.speedup == pytest.approx(math.exp(0.02))
        assert got.ci == pytest.approx((math.exp(low), math.exp(high)))


class TestWarnings:
    def test_few_quads(self) -> None:
        assert timing(noisy(11)).warnings == (
            "only 11 AB/BA quads: the interval is Student's t, wide on purpose; allow the case "
            "more time for a tighter one",
        )
        assert timing(noisy(12)).warnings == ()

    def test_lost_halves(self) -> None:
        keep = [True] * 40
        keep[0] = keep[3] = False
        got = timing(samples([0.0] * 40, keep=keep))
        assert got.warnings[0].startswith("2 kept pairs had lost the other half")
        assert got.dropped_pairs == 4

    @pytest.mark.parametrize(("last", "said"), [(1.2, "20%"), (1 / 1.2, "20%"), (1.09, None)])
    def test_drift(self, last: float, said: str | None) -> None:
        factor = np.repeat([1.0, 1.0, 1.0, last], 10)
        paired = statistics.PairedSamples(
            tuple(1e-3 * factor), tuple(1e-3 * factor), ("AB", "BA") * 20, (1, 1), 0.0
        )
        warned = [w for w in timing(paired).warnings if "drifted" in w]
        assert bool(warned) is (said is not None)
        assert all(f"by {said} from the first to the last quarter" in w for w in warned)

    def test_drift_compares_quarters(self) -> None:
        """Of a ramp from 1 to 2 over 40 pairs: the medians of pairs 0-9 and 30-39."""
        ramp = np.linspace(1, 2, 40)
        paired = statistics.PairedSamples(tuple(ramp), tuple(ramp), ("AB", "BA") * 20, (1, 1), 0.0)
        drift = np.median(ramp[30:]) / np.median(ramp[:10]) - 1
        assert timing(paired).warnings == (
            f"the reference drifted by {drift:.0%} from the first to the last quarter: settle "
            "longer (settle_s) or lock the clocks; pairing cancels it, milliseconds do not",
        )


class TestCompare:
    def test_ratio_threshold_and_labels(self) -> None:
        got = compare_ratio(
            made(1.9, 0.01, floor=0.03),
            made(2.0, 0.01, floor=0.04),
            baseline_path="b.json",
            provenance="published",
            changed_since=["torch 2.11 -> 2.13"],
        )
        assert got.ratio == pytest.approx(0.95)
        assert math.log1p(got.threshold) == pytest.approx(math.hypot(*np.log1p([0.03, 0.04])))
        assert (got.baseline, got.provenance) == ("b.json", "published")
        assert got.changed_since == ("torch 2.11 -> 2.13",)

    def test_is_welchs_interval_and_p_value(self) -> None:
        """Against scipy's own Welch test, of samples whose intervals are Student's."""
        rng = np.random.default_rng(3)
        now, then = rng.normal(-0.05, 0.02, 8), rng.normal(0, 0.04, 15)

        def as_timing(x: np.ndarray) -> Timing:
            half = stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x))
            return made(math.exp(x.mean()), half, pairs=2 * len(x))

        expected = stats.ttest_ind(now, then, equal_var=False, alternative="less")
        got = compare_ratio(as_timing(now), as_timing(then))
        assert got.p_value == pytest.approx(expected.pvalue)
        two_sided = stats.ttest_ind(now, then, equal_var=False).confidence_interval(0.95)
        assert got.ci == pytest.approx((math.exp(two_sided.low), math.exp(two_sided.high)))

    def test_sides_are_not_mixed_up(self) -> None:
        """Upward: how far now may rise and then may fall. Downward: the reverse."""
        point, pairs = 2.0, 2_000_000
        now = made(point, 0, pairs=pairs, ci=(point * math.exp(-0.01), point * math.exp(0.02)))
        then = made(point, 0, pairs=pairs, ci=(point * math.exp(-0.03), point * math.exp(0.04)))
        got = compare_ratio(now, then)
        assert got.ci is not None
        assert math.log(got.ci[0]) == pytest.approx(-math.hypot(0.01, 0.04), rel=1e-4)
        assert math.log(got.ci[1]) == pytest.approx(math.hypot(0.02, 0.03), rel=1e-4)

    def test_p_value_is_of_the_drop_beyond_the_floors(self) -> None:
        now, then = made(1.0, 0.01, floor=0.01), made(1.0, 0.01, floor=0.01)
        edge = 1 / (1 + compare_ratio(now, then).threshold)
        at_edge = compare_ratio(made(edge, 0.01, floor=0.01), then)
        assert at_edge.p_value == pytest.approx(0.5)
        assert compare_ratio(now, then).p_value > 0.9
        assert compare_ratio(made(0.95, 0.01, floor=0.01), then).p_value < 1e-3

    def test_interval_and_p_value_agree_at_the_edge(self) -> None:
        """Two-sided 95% excludes the threshold exactly when the one-sided p is below 2.5%."""
        then = made(1.0, 0.01, floor=0.01)
        for speedup in np.linspace(0.93, 1.0, 71):
            got = compare_ratio(made(float(speedup), 0.01, floor=0.01), then)
            assert got.ci is not None
            assert (got.ci[1] < 1 / (1 + got.threshold)) == (got.p_value < 0.025)

    def test_published_figures_use_their_floor_as_half_width(self) -> None:
        then = made(2.0, 0, pairs=100, floor=0.25, ci=None)
        same = made(2.0, math.log1p(0.25), pairs=100, floor=0.25)
        now = made(1.5, 0.01)
        got, expected = compare_ratio(now, then), compare_ratio(now, same)
        assert got.ci == pytest.approx(expected.ci)
        assert got.p_value == pytest.approx(expected.p_value)

    def test_extended_intervals_are_read_at_their_own_confidence(self) -> None:
        """The standard error is the same whichever confidence the interval was stored at."""
        freedom, error = 49, 0.004
        plain, extended = (
            made(
                2.0,
                error * stats.t.ppf((1 + level) / 2, freedom),
                extensions=extensions,
            )
            for extensions, level in ((0, 0.95), (3, 0.99375))
        )
        then = made(2.1, 0.01)
        first, second = compare_ratio(plain, then), compare_ratio(extended, then)
        assert first.ci == pytest.approx(second.ci)
        assert first.p_value == pytest.approx(second.p_value)

    @pytest.mark.parametrize(
        ("speedup", "p_value"), [(0.98, 0.0), (1.0, 1.0), (1 / 1.01, 1.0), (1.1, 1.0)]
    )
    def test_without_scatter_it_is_certain_and_not_nan(
        self, speedup: float, p_value: float
    ) -> None:
        then = made(1.0, 0.0, floor=0.0)
        now = made(speedup, 0.0, floor=0.0101)
        got = compare_ratio(now, then)
        assert got.p_value == p_value
        assert got.ci == pytest.approx((speedup, speedup))

    @pytest.mark.parametrize(("pairs", "freedom"), [(1, 1), (2, 1), (4, 1), (6, 2), (7, 2), (8, 3)])
    def test_degrees_of_freedom_are_quads_less_one(self, pairs: int, freedom: int) -> None:
        """Two equal standard errors: Welch's degrees of freedom are the sum of the two."""
        error = 0.01 / stats.t.ppf(0.975, freedom)
        got = compare_ratio(made(0.97, 0.01, pairs=pairs), made(1.0, 0.01, pairs=pairs))
        expected = stats.t.sf(-math.log(0.97) / (math.sqrt(2) * error), 2 * freedom)
        assert got.p_value == pytest.approx(expected)

    def test_confidence_is_of_both_stored_intervals_and_of_the_result(self) -> None:
        now, then = made(1.0, 0.01, pairs=2_000_000), made(1.0, 0.02, pairs=2_000_000)
        for confidence in (0.8, 0.99):
            got = compare_ratio(now, then, confidence=confidence)
            assert got.ci is not None
            assert math.log(got.ci[1]) == pytest.approx(math.hypot(0.01, 0.02), rel=1e-4)
        assert compare_ratio(now, then).baseline == ""

    def test_p_values_are_uniform_or_less_without_any_floor(self) -> None:
        """The floor is not what keeps the alarms down: at floor zero p <= 5% in about 5%."""

        def bare(seed: int) -> Timing:
            return timing(noisy(50, seed=seed)).model_copy(update={"noise_floor": 0.0})

        p = np.array([compare_ratio(bare(2 * i), bare(2 * i + 1)).p_value for i in range(200)])
        assert 0.01 <= np.mean(p <= 0.05) <= 0.1
        assert 0.38 <= np.mean(p <= 0.5) <= 0.62


class TestDetectableEffect:
    def test_formula(self) -> None:
        error, freedom = 0.004, 49
        half = error * stats.t.ppf(0.975, freedom)
        got = minimum_detectable_effect(made(2.0, half, floor=0.01))
        quantiles = stats.t.ppf(0.975, 98) + stats.t.ppf(0.8, 98)
        floor = math.sqrt(2) * math.log1p(0.01)
        assert math.log1p(got) == pytest.approx(floor + quantiles * math.sqrt(2) * error)

    def test_is_found_with_the_stated_power(self) -> None:
        """Measured: 80% of gates find a slowdown of this size, within 200 trials' error."""
        then = [timing(noisy(50, seed=i), min_effect=0.01) for i in range(200)]
        effect = float(np.mean([t.min_detectable_effect for t in then if t.min_detectable_effect]))
        found = 0
        for i, stored in enumerate(then):
            slow = noisy(50, speedup=2.0 / (1 + effect), seed=1000 + i)
            got = compare_ratio(timing(slow, min_effect=0.01), stored)
            found += got.p_value <= 0.025
        assert found / 200 == pytest.approx(0.8, abs=0.09)

    def test_confidence_is_that_of_the_stored_interval(self) -> None:
        half, freedom = 0.01, 49
        got = minimum_detectable_effect(made(2.0, half), confidence=0.8)
        error = math.sqrt(2) * half / stats.t.ppf(0.9, freedom)
        quantiles = stats.t.ppf(0.9, 98) + stats.t.ppf(0.8, 98)
        assert math.log1p(got) == pytest.approx(quantiles * error)

    def test_grows_with_floor_and_with_scatter(self) -> None:
        base = minimum_detectable_effect(made(2.0, 0.01, floor=0.01))
        assert minimum_detectable_effect(made(2.0, 0.02, floor=0.01)) > base
        assert minimum_detectable_effect(made(2.0, 0.01, floor=0.02)) > base
        assert minimum_detectable_effect(made(2.0, 0.01, floor=0.01), power=0.95) > base


class TestHolm:
    @pytest.mark.parametrize(
        ("p_values", "rejected"),
        [
            ([], []),
            ([0.05], [True]),
            ([0.0500001], [False]),
            ([0.04, 0.01, 0.03], [False, True, False]),
            ([0.05, 0.01, 0.025], [True, True, True]),
            ([0.02, 0.03, 0.01], [True, True, True]),
            ([0.02, 0.02, 0.02], [False, False, False]),
            ([0.012, 0.9, 0.001, 0.02], [True, False, True, True]),
        ],
    )
    def test_by_hand(self, p_values: list[float], rejected: list[bool]) -> None:
        assert holm(p_values, 0.05) == rejected

    def test_family_wise_alarms_stay_at_alpha(self) -> None:
        rng = np.random.default_rng(0)
        families = rng.random((4000, 100))
        alarms = np.mean([any(holm(family.tolist(), 0.05)) for family in families])
        assert alarms == pytest.approx(0.05, abs=0.012)
        assert np.mean((families < 0.05).any(axis=1)) > 0.98  # what it is for


def test_methods_are_not_confused() -> None:
    published = Method(clock="published", settle_s=10, block_ms=50)
    got = summarize(noisy(20), method=published, min_effect=0.01)
    assert got.method is published
    assert isinstance(timing(noisy(20), control=noisy(20)).aa, Control)


class TestDiagnostic:
    def test_one_quad_gives_a_ratio_and_no_interval(self) -> None:
        got = timing(samples([math.log(39), math.log(38)]), diagnostic=True)
        assert got.speedup == pytest.approx(math.sqrt(39 * 38))
        assert got.ci is None
        assert got.min_detectable_effect is None
        assert got.pairs == 2
        assert got.warnings == ()

    def test_the_candidates_seconds_are_its_controls(self) -> None:
        control = samples([0.0] * 12, candidate_s=2e-3)
        got = timing(
            samples([math.log(39)] * 2), control=control, control_arm="candidate", diagnostic=True
        )
        assert got.candidate_s == pytest.approx(2e-3)
        assert got.aa is not None
        assert (got.aa.arm, got.aa.pairs) == ("candidate", 12)
        assert got.speedup == pytest.approx(39)

    def test_a_claim_still_needs_two_quads(self) -> None:
        with pytest.raises(NoUsablePairsError, match="at least 2"):
            timing(samples([0.1, 0.1]))

    def test_no_quad_is_no_diagnosis_either(self) -> None:
        with pytest.raises(NoUsablePairsError, match="at least 1"):
            timing(samples([0.1, 0.1], keep=[True, False]), diagnostic=True)

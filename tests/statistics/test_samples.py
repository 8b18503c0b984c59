"""Raw samples: what is refused, how pairs become quads, and what happens when too few are left."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from statistics_makers import samples

from pytest_fastlayer.records import Verdict
from pytest_fastlayer.samples import NoUsablePairsError, UnresolvableError, usable_quads


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "candidate_s",
            (1.0,),
            r"candidate_s has 1 entries but reference_s has 4: give one entry per pair in each$",
        ),
        ("order", ("AB",), r"order has 1 entries but reference_s has 4"),
        ("keep", (True,) * 5, r"keep has 5 entries but reference_s has 4"),
        ("order", ("AB", "BA", "AA", "BA"), r"order\[2\] is 'AA': expected \"AB\" or \"BA\""),
        ("reference_s", (1.0, math.nan, 1.0, 1.0), r"reference_s\[1\] is nan: expected finite"),
        ("candidate_s", (1.0, 1.0, 1.0, math.inf), r"candidate_s\[3\] is inf: expected finite"),
        ("candidate_s", (-1e-9, 1.0, 1.0, 1.0), r"candidate_s\[0\] is -1e-09: expected finite"),
        ("forwards", (1, 0), r"forwards is \(1, 0\): expected at least 1"),
        ("resolution_s", -1e-9, r"resolution_s is -1e-09: expected finite"),
        ("resolution_s", math.nan, r"resolution_s is nan: expected finite"),
        ("resolution_s", math.inf, r"resolution_s is inf: expected finite"),
    ],
)
def test_refuses_with_place_and_expectation(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(samples([0.0] * 4), **{field: value})


def test_forwards_of_one_and_a_perfect_timer_are_fine() -> None:
    paired = samples([0.0] * 4, forwards=(1, 1), resolution_s=0.0)
    assert len(usable_quads(paired).quad_ratios) == 2


@pytest.mark.parametrize(
    ("order", "keep", "starts"),
    [
        ("AB BA AB BA", "1111", [0, 2]),
        ("BA AB BA AB", "1111", [0, 2]),
        ("AB BA BA AB", "1111", [0, 2]),
        ("AB BA AB BA", "1011", [2]),
        ("AB BA AB BA", "0111", [2]),
        ("AB BA AB BA", "1001", []),
        ("AB BA AB", "111", [0]),
        ("AB AB BA", "111", [1]),
        ("AB BA BA BA AB", "11111", [0, 3]),
        ("AB", "1", []),
        ("", "", []),
    ],
)
def test_quads_are_neighbours_of_different_order_both_kept(
    order: str, keep: str, starts: list[int]
) -> None:
    names = order.split()
    paired = samples([0.0] * len(names), order=names, keep=[digit == "1" for digit in keep])
    assert paired.quads() == starts


def test_dropping_never_marries_pairs_that_were_not_neighbours() -> None:
    ratios = [0.1, 0.3, 9.0, 9.0, 0.5, 0.9]
    paired = samples(ratios, keep=[True, True, False, False, True, True])
    usable = usable_quads(paired)
    np.testing.assert_allclose(usable.log_ratios, [0.1, 0.3, 0.5, 0.9])
    np.testing.assert_allclose(usable.quad_ratios, [0.2, 0.7])
    np.testing.assert_allclose(usable.disagreements, [0.1, 0.2])


def test_all_dropped_is_an_error_with_its_reason() -> None:
    paired = samples([0.0] * 20, keep=[False] * 20)
    with pytest.raises(NoUsablePairsError) as caught:
        usable_quads(paired, ["clock moved from 1980 to 345 MHz", "thermal slowdown"])
    message = str(caught.value)
    assert message.startswith("0 whole AB/BA quads are usable, at least 2 are needed: 20 of 20")
    assert "(clock moved from 1980 to 345 MHz; thermal slowdown)" in message
    assert message.endswith(
        "; lock the device's clocks, let it cool, stop other work on it, or measure more pairs"
    )
    assert caught.value.verdict is Verdict.INCONCLUSIVE


def test_one_quad_is_too_few_and_two_are_enough() -> None:
    with pytest.raises(NoUsablePairsError, match=r"1 whole .* 1 of 4 pairs were dropped; lock"):
        usable_quads(samples([0.0] * 4, keep=[True, True, True, False]))
    assert len(usable_quads(samples([0.0] * 4)).quad_ratios) == 2


@pytest.mark.parametrize("seconds", [0.0, 5e-324])
def test_work_below_the_timers_step_is_unresolvable_not_a_division_by_zero(seconds: float) -> None:
    paired = replace(samples([0.0] * 8), candidate_s=(seconds,) * 8, resolution_s=1e-6)
    with pytest.raises(UnresolvableError, match="50 forwards of the candidate") as caught:
        usable_quads(paired)
    assert caught.value.verdict is Verdict.UNRESOLVABLE
    assert "larger block_ms" in str(caught.value)


def test_one_zero_among_long_blocks_is_unresolvable() -> None:
    whole = samples([0.0] * 8)
    paired = replace(whole, reference_s=(0.0, *whole.reference_s[1:]))
    with pytest.raises(UnresolvableError, match=r"of the reference .*\(shortest 0 s\)"):
        usable_quads(paired)


def test_unresolvable_says_block_and_timer_in_seconds() -> None:
    whole = samples([0.0] * 4, candidate_s=1e-6, forwards=(40, 4), resolution_s=1e-6)
    paired = replace(whole, candidate_s=(1e-6, 1e-6, 1e-6, 5e-7))
    with pytest.raises(UnresolvableError) as caught:
        usable_quads(paired)
    assert str(caught.value) == (
        "a block of 4 forwards of the candidate lasts 4e-06 s (shortest 2e-06 s) on a timer with "
        "steps of 1e-06 s: expected at least 20 steps; batch more forwards into a block (a larger "
        "block_ms) or time a larger workload"
    )


def test_the_block_counts_not_the_forward() -> None:
    """Twenty steps of the timer in a block suffice, however short one forward is."""
    enough = samples([0.0] * 4, candidate_s=1e-6, forwards=(20, 20), resolution_s=1e-6)
    assert len(usable_quads(enough).quad_ratios) == 2
    for forwards in ((19, 20), (20, 19)):
        with pytest.raises(UnresolvableError, match="a block of 19 forwards"):
            usable_quads(replace(enough, forwards=forwards))


def test_extension_appends_in_order() -> None:
    first, second = samples([0.1] * 4), samples([0.2] * 6, resolution_s=1e-6)
    both = first.extended(second)
    assert both.reference_s == first.reference_s + second.reference_s
    assert both.candidate_s == first.candidate_s + second.candidate_s
    assert both.order == ("AB", "BA") * 5
    assert both.resolution_s == 1e-6
    assert both.keep is None
    assert both.forwards == first.forwards


def test_extension_keeps_what_either_side_dropped() -> None:
    plain, dropped = samples([0.1] * 2), samples([0.2] * 2, keep=[True, False])
    assert plain.extended(dropped).keep == (True, True, True, False)
    assert dropped.extended(plain).keep == (True, False, True, True)


def test_extension_by_other_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(20, 50\) forwards by blocks of \(20, 51\)"):
        samples([0.1] * 2).extended(samples([0.1] * 2, forwards=(20, 51)))

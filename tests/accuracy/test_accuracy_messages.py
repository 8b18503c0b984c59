"""What a failure says."""

from __future__ import annotations

import pytest
import torch

from pytest_fastlayer.accuracy import (
    ElementwiseError,
    Tolerance,
    assert_elementwise,
    check_trials,
    compare,
    float64_twin,
    to_record,
)
from pytest_fastlayer.accuracy_message import explain

NAN, INF = float("nan"), float("inf")


def test_a_failure_says_how_many_where_and_how_far() -> None:
    reference = torch.zeros(4, 8)
    reference[1, 2] = 1.0
    candidate = reference.clone()
    candidate[1, 2] = 1.5
    candidate[3, 7] = 0.5
    with pytest.raises(ElementwiseError) as caught:
        assert_elementwise(candidate, reference, seed=7, replay="pytest -k here")
    lines = str(caught.value).splitlines()
    assert "2 of 32 elements (6.25%) fail |c-r| <= 0.002 OR |c-r| <= 0.02*|r|" in lines[0]
    assert lines[1:] == [
        "  worst by budget: output[3, 7]: candidate 0.5, reference 0, difference 0.5, "
        "allowed 0.002 (250x its tolerance), seed 7",
        "  failing feature columns of output: 2 (1), 7 (1) (2 of 8)",
        "  seed: 7",
        "  replay: pytest -k here",
    ]
    assert caught.value.comparison.failed == 2


def test_a_larger_difference_elsewhere_is_mentioned() -> None:
    reference = torch.tensor([100.0, 0.0])
    text = explain(compare(torch.tensor([101.0, 0.5]), reference))
    assert "worst by budget: output[1]" in text
    assert "largest difference anywhere: 1" in text


@pytest.mark.parametrize(
    ("candidate", "reference", "words"),
    [
        (float("nan"), 1.0, ("candidate 1 NaN and 0 inf", "the candidate alone is not finite")),
        (float("inf"), 1.0, ("candidate 0 NaN and 1 inf", "the candidate alone is not finite")),
        (1.0, float("nan"), ("reference 1 NaN and 0 inf", "the reference alone is not finite")),
    ],
)
def test_nonfinite_names_the_arm(
    candidate: float, reference: float, words: tuple[str, ...]
) -> None:
    text = explain(compare(torch.tensor([0.0, candidate]), torch.tensor([0.0, reference])))
    assert all(word in text for word in words)
    assert "first of them: output[1]" in text
    assert "worst finite element uses 0 of its tolerance" in text


@pytest.mark.parametrize(("mode", "allowed"), [("either", "allowed 0.5"), ("sum", "allowed 0.75")])
def test_the_message_states_what_was_allowed(mode: str, allowed: str) -> None:
    tolerance = Tolerance(0.25, 0.125, mode)  # type: ignore[arg-type]
    result = compare(torch.tensor([-2.0]), torch.tensor([-4.0]), tolerance)
    text = explain(result)
    assert "difference 2" in text
    assert allowed in text
    assert tolerance.rule in text
    small = compare(torch.tensor([1.0]), torch.tensor([0.0]), tolerance)
    assert "allowed 0.25" in explain(small)


def test_all_columns_failing_are_not_listed_one_by_one() -> None:
    text = explain(compare(torch.ones(2, 100), torch.zeros(2, 100)))
    assert "all 100" in text
    text = explain(compare(torch.eye(100)[:50], torch.zeros(50, 100)))
    assert "and 42 more (50 of 100)" in text


def test_integers_and_structure_have_words_of_their_own() -> None:
    text = explain(compare(torch.tensor([1, 2]), torch.tensor([1, 3])))
    assert "candidate 2, reference 3 (integers and booleans must be equal)" in text
    text = explain(compare(torch.zeros(4, 1), torch.zeros(4)))
    assert "differs in structure" in text
    assert "candidate's shape is (4, 1), reference's is (4,)" in text


def test_float64_says_which_arm_is_off() -> None:
    truth = torch.zeros(3, dtype=torch.float64)
    good, bad = torch.zeros(3), torch.tensor([0.0, 0.5, 0.0])
    assert "the candidate is the arm that is off" in explain(compare(bad, good, truth=truth))
    assert "the reference is the arm that is off" in explain(compare(good, bad, truth=truth))


def inputs(seed: int) -> tuple[torch.Tensor]:
    return (torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)),)


def test_trials_merge_seeds_and_report_both_arms_against_float64() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 4).eval()
    trials = check_trials(
        layer, lambda x: layer(x) + 1e-3, inputs, range(5), float64=float64_twin(layer), keep=2
    )
    assert trials.passed
    assert trials.message is None
    record = trials.record
    assert (record.trials, record.total, record.failed) == (5, 5 * 8 * 4, 0)
    assert record.seeds == (0, 1, 2, 3, 4)
    assert record.rms_vs_float64 is not None
    assert record.rms_vs_float64.candidate == pytest.approx(1e-3, rel=1e-3)
    truth = float64_twin(layer)(*inputs(0))
    error = (layer(*inputs(0)) - truth).square().mean().sqrt().item()
    assert record.rms_vs_float64.reference == pytest.approx(error, rel=1e-6)
    assert sorted(trials.kept) == [0, 1]
    assert layer.weight.dtype == torch.float32


def test_trials_name_the_failing_seeds() -> None:
    def candidate(x: torch.Tensor) -> torch.Tensor:
        return x + (1.0 if torch.equal(x, inputs(3)[0]) else 0.0)

    trials = check_trials(lambda x: x, candidate, inputs, range(5), replay="pytest -k it")
    assert not trials.passed
    assert trials.message is not None
    assert "failing seeds: 3 (1 of 5)" in trials.message
    assert "seed 3" in trials.message
    assert "replay: pytest -k it" in trials.message
    assert trials.record.failed == 8 * 16


def test_trials_without_a_seed_check_nothing_and_say_so() -> None:
    with pytest.raises(ValueError, match="no seeds"):
        check_trials(lambda x: x, lambda x: x, inputs, [])


def test_float64_twin_widens_inputs_of_functions_and_leaves_integers() -> None:
    seen: list[torch.dtype] = []

    def function(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        seen.extend((x.dtype, index.dtype))
        return x[index]

    output = float64_twin(function)(torch.ones(3), torch.tensor([1]))
    assert seen == [torch.float64, torch.int64]
    assert isinstance(output, torch.Tensor)
    assert output.dtype == torch.float64


def test_records_merge_several_comparisons() -> None:
    parts = [compare(torch.ones(2), torch.ones(2)), compare(torch.ones(2), torch.zeros(2))]
    record = to_record(parts, [1, 2])
    assert (record.total, record.failed, record.trials) == (4, 2, 2)
    assert record.tolerance.mode == "either"
    strict = Tolerance(0.0, 0.0, "sum")
    exact = to_record([compare(torch.ones(1), torch.zeros(1), strict)], [1], strict)
    assert exact.budget_used == 1e9


def test_float64_is_evaluated_for_the_first_trial_and_nothing_kept_unless_asked() -> None:
    calls: list[int] = []

    def exact(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.double()

    trials = check_trials(lambda x: x, lambda x: x, inputs, range(3), float64=exact)
    assert len(calls) == 1
    assert trials.kept == {}


def test_a_mismatch_or_an_integer_leaf_does_not_upset_the_float64_figures() -> None:
    def mixed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, str]:
        return x, x.argmax(), "name"

    trials = check_trials(mixed, mixed, inputs, [1], float64=float64_twin(mixed))
    assert trials.passed
    assert trials.record.rms_vs_float64 is not None
    assert trials.record.rms_vs_float64.candidate == 0.0
    trials = check_trials(
        lambda x: x, lambda x: x[:1], inputs, [1], float64=float64_twin(torch.sin)
    )
    assert not trials.passed
    assert trials.record.rms_vs_float64 is None
    integers = check_trials(torch.argmax, torch.argmax, inputs, [1], float64=torch.argmax)
    assert integers.record.rms_vs_float64 is None


def test_the_figures_against_float64_stand_in_the_message() -> None:
    trials = check_trials(lambda x: x, lambda x: x + 1, inputs, [1], float64=lambda x: x.double())
    assert trials.message is not None
    assert "  rms against float64: candidate 1, reference 0" in trials.message.splitlines()


@pytest.mark.parametrize(
    ("candidate", "reference", "alone"),
    [
        ([NAN, 0.0], [0.0, 0.0], "the candidate alone"),
        ([NAN, 0.0], [0.0, NAN], None),
        ([NAN, INF], [0.0, INF], None),
        ([0.0, 0.0], [0.0, INF], "the reference alone"),
        ([NAN, 0.0], [INF, 0.0], None),
    ],
)
def test_an_arm_is_blamed_only_where_it_is_alone(
    candidate: list[float], reference: list[float], alone: str | None
) -> None:
    text = explain(compare(torch.tensor(candidate), torch.tensor(reference)))
    assert ("alone" in text) is (alone is not None)
    assert alone is None or alone in text


def test_lists_are_cut_only_where_they_are_long() -> None:
    text = explain(compare(torch.eye(9)[:8], torch.zeros(8, 9)))
    assert "7 (1) (8 of 9)" in text
    assert "more" not in text
    text = explain(compare((torch.ones(1, 2), torch.eye(2)[:1]), (torch.zeros(1, 2),) * 2))
    assert "columns of output[0]: all 2" in text
    assert "columns of output[1]: 0 (1) (1 of 2)" in text
    assert text.count("columns of output[0]") == 1


def test_a_worst_element_at_its_limit_is_not_called_failing() -> None:
    result = compare(torch.tensor([0.25, NAN]), torch.zeros(2), Tolerance(0.25, 0.0))
    assert "worst finite element uses 1 of its tolerance, at output[0]" in explain(result)
    assert "worst" not in explain(compare(torch.tensor([NAN]), torch.zeros(1)))
    beyond = compare(torch.tensor([0.375]), torch.zeros(1), Tolerance(0.25, 0.0))
    assert "(1.5x its tolerance)" in explain(beyond)


def test_float64_tells_the_arms_apart_by_distance() -> None:
    def text(candidate: float, reference: float, truth: float) -> str:
        c, r = torch.tensor([candidate]), torch.tensor([reference])
        return explain(compare(c, r, truth=torch.tensor([truth], dtype=torch.float64)))

    assert "candidate by 3, reference by 2" in text(-1.0, 4.0, 2.0)
    assert "the candidate is the arm that is off" in text(-1.0, 4.0, 2.0)
    assert "the reference is the arm that is off" in text(-1.0, 4.0, 1.0)
    assert "the candidate is the arm that is off" in text(-1.0, 3.0, 1.0)  # of two as far off
    assert "float64 says inf there" in text(-1.0, 4.0, INF)
    assert "is the arm that is off" not in text(-1.0, 4.0, INF)

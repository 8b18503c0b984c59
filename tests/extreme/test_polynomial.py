"""Coefficients, statistics, the guard's data, exact rows, and the scan in plain torch."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fastlayer import polynomial
from fastlayer.polynomial import Guard, Norms, ScoreStatistics


def heads(
    count: int, tokens: int, dim: int, spread: float = 0.33, mean: float = 0.0, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``q, k, v [H, N, D]`` whose scores are about N(mean, spread^2)."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(count, tokens, dim, generator=generator) for _ in range(3))
    q *= spread
    # A direction that all queries share, and keys share along it, shifts every score alike.
    q[:, :, 0] = mean * dim**0.5
    k[:, :, 0] = 1.0
    return q, k, v


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


@pytest.mark.parametrize(("mean", "sigma"), [(0.0, 0.3), (0.5, 0.45), (-0.8, 0.7)])
def test_hermite_is_the_least_squares_fit(mean: float, sigma: float) -> None:
    """Against a weighted fit on Gauss-Hermite nodes, which knows nothing of the derivation."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    scores = mean + sigma * nodes
    root = np.sqrt(weights)[:, None]
    fit = np.linalg.lstsq(
        root * np.stack([scores**0, scores, scores**2], 1), root[:, 0] * np.exp(scores), rcond=None
    )[0]
    log_scale, *rest = polynomial.hermite(torch.tensor([mean]), torch.tensor([sigma]))[0].tolist()
    np.testing.assert_allclose(math.exp(log_scale) * np.array(rest), fit, rtol=2e-5, atol=2e-5)
    values = math.exp(log_scale) * (rest[0] + rest[1] * scores + rest[2] * scores**2)
    second = (weights * np.exp(scores) ** 2).sum()
    missed = (weights * (values - np.exp(scores)) ** 2).sum() / second * math.exp(sigma**2)
    assert math.sqrt(missed) == pytest.approx(polynomial.truncation(sigma), rel=1e-3)


def test_taylor_is_taylor() -> None:
    rows = polynomial.taylor(torch.zeros(3), torch.ones(3))
    assert rows.tolist() == [[0.0, 1.0, 1.0, 0.5]] * 3


def test_no_weight_is_negative_below_a_spread_of_one() -> None:
    scores = torch.linspace(-9, 9, 4001)
    for sigma in (0.2, 0.6, 0.99):
        _, c0, c1, c2 = polynomial.hermite(torch.tensor([0.3]), torch.tensor([sigma]))[0]
        assert (c0 + c1 * scores + c2 * scores**2).min() > 0


def test_sampled_rows_cover_the_sequence_and_are_fixed() -> None:
    rows = polynomial.sampled_rows(4096, 100_000, 512, 14, "cpu")
    assert len(rows) == 512
    assert rows.min() >= 4096
    assert rows.max() < 100_000
    assert (rows.diff() > 0).all()
    assert rows.diff().max() <= 2 * 96_000 / 512
    assert torch.equal(rows, polynomial.sampled_rows(4096, 100_000, 512, 14, "cpu"))
    assert polynomial.sampled_rows(8, 10, 512, 14, "cpu").tolist() == [8, 9]


@pytest.mark.parametrize("tokens", [512, 600])
def test_statistics_are_those_of_the_scores_themselves(tokens: int) -> None:
    q, k, v = heads(3, tokens, 16, spread=0.5, mean=0.4)
    q[1] *= 2.0
    found = polynomial.survey(q, k, v, first_row=128, chunk=64).scores
    rows = polynomial.sampled_rows(128, tokens, 512, 14, "cpu")
    scores = torch.einsum("hsd,hnd->hsn", q[:, rows], k).double() / 4.0
    past = (torch.arange(tokens) < (rows // 64 * 64)[:, None]).double()
    weight = past / past.sum(1, keepdim=True) / len(rows)
    mean = (scores * weight).sum((1, 2))
    sigma = ((scores**2 * weight).sum((1, 2)) - mean**2).sqrt()
    torch.testing.assert_close(found.mean.double(), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.sigma.double(), sigma, rtol=1e-4, atol=1e-5)
    assert found.worst_sigma >= found.sigma.max().item() * 0.999
    assert found.worst_sigma == pytest.approx(found.sigma.max().item(), rel=0.2)
    norms = torch.stack([q.norm(dim=-1).max(), k.norm(dim=-1).max()])
    assert found.largest_norm == pytest.approx(norms.max().item(), rel=1e-5)


def statistics(sigma: float, mean: float = 0.0, norm: float = 8.0) -> ScoreStatistics:
    return ScoreStatistics(torch.zeros(1), torch.zeros(1), sigma, mean, norm)


def test_the_guard_refuses_until_calibrated_and_beyond_its_limits() -> None:
    assert Guard(None, "uncalibrated").objection(statistics(0.1)) == "the guard is uncalibrated"
    guard = Guard(0.45, "calibrated")
    assert guard.objection(statistics(0.45, 1.0)) == ""
    assert "score spread 0.46 beyond 0.45" in guard.objection(statistics(0.46))
    assert "score mean" in guard.objection(statistics(0.3, 1.1))
    assert "norm" in guard.objection(statistics(0.3, 0.0, 300.0))
    assert guard.objection(statistics(float("nan")))


def test_the_committed_guard_is_exact_or_supported_by_its_curve() -> None:
    guard = polynomial.committed_guard()
    assert (guard.threshold is None) == (guard.provenance == "uncalibrated")


#: Of the shape and the density that the default factors give.
CURVE = [
    (0.206, 0.39), (0.275, 0.38), (0.344, 0.43), (0.379, 0.5), (0.413, 0.56), (0.448, 0.72),
    (0.482, 0.9), (0.516, 1.2), (0.585, 2.0), (0.689, 3.1), (0.861, 5.5), (1.033, 10.0),
    (1.24, 9.0),
]  # fmt: skip


def test_a_threshold_is_where_the_curve_crosses_the_budget() -> None:
    expected = 0.413 + 0.035 * 0.04 / 0.16
    assert polynomial.calibrated_threshold(CURVE[::-1]) == pytest.approx(expected)
    failed = [(sigma, 1e9 if sigma > 0.43 else budget) for sigma, budget in CURVE]
    assert polynomial.calibrated_threshold(failed) == pytest.approx(0.413, abs=1e-6)


@pytest.mark.parametrize(
    ("curve", "problem"),
    [
        ([], "0 spreads from"),
        ([(0.0, 0.39), (3300.0, 1e9)], "0 spreads from"),
        (CURVE[2:9], "7 spreads from"),
        ([*CURVE[2:8], *CURVE[2:8]], "6 spreads from"),
        ([*CURVE[:4], *CURVE[6:]], r"it crosses between spreads 0\.379 and 0\.482"),
        ([(s, 0.39) for s, _ in CURVE], "no crossing"),
        ([(s, 0.7) for s, _ in CURVE], "no crossing"),
        ([(s, 1.0 - b / 10) for s, b in CURVE], r"falls below 0\.6 again"),
        ([*CURVE[:-1], (1.24, 0.5)], r"falls below 0\.6 again"),
        ([(0.206, 0.9), *CURVE[1:]], r"falls below 0\.6 again"),
        ([(0.206, 0.55), *CURVE[1:]], r"falls from 0\.55 to 0\.38 at spread 0\.275"),
        ([(0.206, float("nan")), *CURVE[1:]], r"nan\) is no spread and budget"),
        ([*CURVE, (float("inf"), 9.0)], "is no spread and budget"),
        ([(-0.1, 0.3), *CURVE], "is no spread and budget"),
    ],
)
def test_a_coarse_or_strange_curve_supports_no_threshold(curve: list, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"calibration curve of {len(curve)} points: .*{problem}"):
        polynomial.calibrated_threshold(curve)


def test_a_guard_is_read_if_its_curve_supports_it() -> None:
    text = {"threshold": 0.421, "curve": CURVE, "device": "a GPU", "evidence": "a file"}
    guard = polynomial.read_guard(json.dumps(text))
    assert guard == Guard(0.421, "calibrated on a GPU, a file")
    for threshold in (0.43, 0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"given threshold .*; expected at most 0\.42"):
            polynomial.read_guard(json.dumps({**text, "threshold": threshold}))
    for odd in ("{}", "[]", "?", json.dumps({**text, "curve": [1]}), json.dumps({"threshold": 1})):
        with pytest.raises(ValueError, match="expected an object with threshold"):
            polynomial.read_guard(odd)


def test_exact_rows_are_exact_over_blocks_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polynomial, "_KEYS_AT_ONCE", 96)
    q, k, v = heads(2, 300, 16, spread=4.0)
    rows = torch.tensor([299, 0, 95, 96, 97, 150, 0])
    result = polynomial.exact_rows(q, k, v, rows)
    torch.testing.assert_close(result, exact(q, k, v)[:, rows], rtol=1e-5, atol=1e-5)


def test_checked_rows_hold_the_likely_worst() -> None:
    q, k, _ = heads(2, 2048, 16)
    q[0, 777] *= 40.0
    k[1, 900] *= 40.0
    q[1, 1500] = k[1, 900] * 0.1
    q[1, 300] = k[1, 900]
    spread = torch.zeros(2, 2048)
    spread[0, [600, 601]], spread[1, [100, 2047]] = 3.0, 5.0
    norms = Norms.of(q, k, polynomial.operations())
    rows = polynomial.check_rows(q, k, norms, spread, first_row=256)
    assert len(rows) == polynomial.CHECK_ROWS + 8
    assert {777, 1500, 600, 601, 2047} <= set(rows.tolist())
    assert rows.min() >= 256


def test_budget_counts_what_is_not_finite() -> None:
    ones = torch.ones(4)
    assert polynomial.budget_used(ones * 1.01, ones).item() == pytest.approx(0.5, rel=1e-3)
    assert polynomial.budget_used(torch.tensor([1.0, math.nan]), torch.ones(2)).item() == math.inf
    assert polynomial.budget_used(ones, ones * math.inf).item() == math.inf


def errors(
    sigma: float, kind: str = "hermite", mean: float = 0.0, tokens: int = 4096, first: int = 1024
) -> tuple[float, float]:
    """Worst and rms difference from exact attention, of rows from ``first`` on."""
    q, k, v = heads(2, tokens, 16, spread=sigma, mean=mean)
    found = polynomial.survey(q, k, v, first_row=first, chunk=256).scores
    out = torch.full_like(q, math.nan)
    coefficients = polynomial.coefficients_of(kind, found)
    polynomial.polynomial_attention(q, k, v, out, coefficients, first_row=first, chunk=256)
    assert out[:, :first].isnan().all()
    difference = (out - exact(q, k, v))[:, first:]
    return difference.abs().max().item(), difference.square().mean().sqrt().item()


def test_the_scan_is_attention_up_to_the_neglected_terms() -> None:
    """Errors fall with the third power of the spread, and least squares beats Taylor."""
    (_, wide), (_, narrow) = errors(0.4), errors(0.1)
    assert narrow < 2e-5
    assert narrow < wide / 20
    assert wide < errors(0.4, "taylor")[1] / 1.3


def test_a_mean_changes_nothing_for_least_squares() -> None:
    assert errors(0.3, mean=0.7)[1] == pytest.approx(errors(0.3)[1], rel=0.3)
    assert errors(0.3, "taylor", mean=0.7)[1] > 3 * errors(0.3, mean=0.7)[1]


@pytest.mark.parametrize("tokens", [513, 640, 700])
def test_ragged_ends(tokens: int) -> None:
    q, k, v = heads(1, tokens, 16, spread=0.05)
    out = torch.full_like(q, math.nan)
    coefficients = polynomial.hermite(torch.zeros(1), torch.full((1,), 0.05))
    polynomial.polynomial_attention(q, k, v, out, coefficients, first_row=128, chunk=128)
    torch.testing.assert_close(out[:, 128:], exact(q, k, v)[:, 128:], rtol=0, atol=1e-4)


def test_rows_of_their_own_beat_one_fit_for_all() -> None:
    """Queries of different norms, and different means: what one fit for a head cannot follow."""
    q, k, v = heads(1, 4096, 16, spread=0.3)
    q *= torch.linspace(0.2, 1.5, 4096)[torch.randperm(4096)][None, :, None]
    q[:, :, 0] = torch.linspace(-1.5, 1.5, 4096)
    found = polynomial.survey(q, k, v, first_row=1024, chunk=256).scores
    worst = {}
    for kind in polynomial.COEFFICIENTS:
        out = torch.zeros_like(q)
        coefficients = polynomial.coefficients_of(kind, found)
        polynomial.polynomial_attention(q, k, v, out, coefficients, first_row=1024, chunk=256)
        worst[kind] = (out - exact(q, k, v))[:, 1024:].square().mean().sqrt().item()
    assert worst["rows"] < 0.7 * worst["hermite"] < 0.7 * worst["taylor"]


def test_a_row_of_its_own_never_divides_by_zero() -> None:
    """Far beyond any guard the result is wrong but finite: the denominator is n exp(..)."""
    q, k, v = heads(1, 1024, 16, spread=8.0)
    out = torch.zeros_like(q)
    polynomial.polynomial_attention(q, k, v, out, None, first_row=256, chunk=256)
    assert out.isfinite().all()


def test_spikes_inside_the_chunk_stay_finite() -> None:
    q, k, v = heads(1, 512, 16)
    q[0, 300] = k[0, 290] * 200.0
    out = torch.zeros_like(q)
    coefficients = polynomial.hermite(torch.zeros(1), torch.full((1,), 0.3))
    polynomial.polynomial_attention(q, k, v, out, coefficients, first_row=128, chunk=128)
    assert out.isfinite().all()
    torch.testing.assert_close(out[0, 300], v[0, 290])

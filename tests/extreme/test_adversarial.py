"""Scores made to deceive: the guard or the check of rows catches each, or the output passes.

N = 16,384 as the polynomial would meet it, with few and narrow heads. The contexts stand for the
layer's output: the check compares rows of it with exact attention, as the route does with rows of
the residual.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from fastlayer import polynomial
from fastlayer.polynomial import CHECK_BUDGET, Guard

TOKENS, HEADS, DIM = 16_384, 2, 16
FIRST, CHUNK = 4096, 512

#: Where the prototypes on an H200 stayed within 0.6 of the tolerance; calibration decides.
GUARD = Guard(0.45, "assumed for this test")

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tame(spread: float = 0.15) -> Inputs:
    """Scores near N(0, spread^2), and values whose mean attention leaves something to compare."""
    generator = torch.Generator().manual_seed(99)
    q, k, v = (torch.randn(HEADS, TOKENS, DIM, generator=generator) for _ in range(3))
    # Rows of one norm: an ordinary LayerNorm's output varies little more.
    return F.normalize(q, dim=-1) * spread * DIM**0.5, k, v


def spiked() -> Inputs:
    """One key that a fifth of the queries agree with: e^14 against sixteen thousand others."""
    q, k, v = tame()
    direction = F.normalize(torch.ones(DIM), dim=0)
    k[0, 5000] = direction * 100.0
    q[0, 6000::5] += direction * 0.56
    return q, k, v


def rare_spikes() -> Inputs:
    """Six queries in all that score high with ordinary keys; no sample of rows would meet them."""
    q, k, v = tame()
    q[1, [4500, 6001, 8009, 9973, 12_007, 16_000]] *= 60.0
    return q, k, v


def bimodal() -> Inputs:
    """Half of the keys score +1.2 and half -1.2: small variance inside each mode."""
    q, k, v = tame(0.05)
    direction = F.normalize(torch.ones(DIM), dim=0)
    q[0] += direction * 1.2 * DIM**0.5
    k[0] -= (k[0] @ direction)[:, None] * direction
    k[0, ::2] += direction
    k[0, 1::2] -= direction
    return q, k, v


def heavy_tailed() -> Inputs:
    """Keys whose norms follow a power law."""
    q, k, v = tame()
    generator = torch.Generator().manual_seed(5)
    uniform = torch.rand(TOKENS, 1, generator=generator).clamp_min(1e-6)
    k[0] *= uniform ** (-1 / 2.2)
    return q, k, v


def drifting() -> Inputs:
    """A spread that grows eightfold along the sequence."""
    q, k, v = tame(0.12)
    q[0] *= torch.linspace(1.0, 8.0, TOKENS)[:, None]
    return q, k, v


def hidden_from_the_guard() -> Inputs:
    """Tame exactly in the rows that the guard samples, wide in all others."""
    q, k, v = tame(1.2)
    rows = polynomial.sampled_rows(FIRST, TOKENS, polynomial.GUARD_ROWS, 14, "cpu")
    q[:, rows] *= 0.1
    return q, k, v


def hidden_burst() -> Inputs:
    """A stretch of a hundred rows between two sampled ones is wide, in one head."""
    q, k, v = tame(0.1)
    q[1, 10_000:10_100] *= 15.0
    return q, k, v


def loud_rows(seed: int, known: bool) -> Inputs:
    """Half a percent of the rows are wide, none of them sampled if the places are ``known``.

    The query of largest norm is orthogonal to every key, and the key of largest norm is the last:
    neither leads to a loud row.
    """
    q, k, v = tame(0.1)
    generator = torch.Generator().manual_seed(seed)
    loud = torch.rand(TOKENS, generator=generator) < 0.005
    if known:
        for count, place in ((polynomial.GUARD_ROWS, 14), (polynomial.CHECK_ROWS, 41)):
            loud[polynomial.sampled_rows(FIRST, TOKENS, count, place, "cpu")] = False
    q[0, loud] *= 12.0
    direction = F.normalize(torch.ones(DIM), dim=0)
    k -= (k @ direction)[..., None] * direction
    q[:, 5001] = direction * 60.0
    k[:, -1] *= 40.0
    return q, k, v


def defended(inputs: Inputs) -> tuple[str, float, float]:
    """What stopped the polynomial ("" if nothing did), its checked budget, and its true one."""
    q, k, v = inputs
    seen = polynomial.survey(q, k, v, first_row=FIRST, chunk=CHUNK)
    refusal = GUARD.objection(seen.scores)
    out = torch.zeros_like(q)
    spread = polynomial.polynomial_attention(q, k, v, out, None, first_row=FIRST, chunk=CHUNK)
    rows = polynomial.check_rows(q, k, seen.norms, spread, first_row=FIRST)
    exact_rows = polynomial.exact_rows(q, k, v, rows)
    checked = float(polynomial.budget_used(out[:, rows], exact_rows))
    exact = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    true = float(polynomial.budget_used(out[:, FIRST:], exact[:, FIRST:]))
    if refusal:
        return f"guard: {refusal}", checked, true
    return ("row check" if checked > CHECK_BUDGET else ""), checked, true


def test_tame_scores_pass_undisturbed() -> None:
    stopped, checked, true = defended(tame(0.1))
    assert stopped == ""
    assert checked <= true <= CHECK_BUDGET


@pytest.mark.parametrize(
    ("kind", "by"),
    [
        (spiked, "row check"),
        (rare_spikes, "row check"),
        (bimodal, "guard"),
        (heavy_tailed, "guard"),
        (drifting, "guard"),
        (hidden_from_the_guard, "row check"),
        (hidden_burst, "row check"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_kind_is_caught_or_passes(kind: Callable[[], Inputs], by: str) -> None:
    stopped, checked, true = defended(kind())
    assert stopped or true <= 1.0, f"checked {checked:.2f}, true {true:.2f}"
    assert stopped.startswith(by), f"stopped by {stopped!r}, checked {checked:.2f}, true {true:.2f}"


@pytest.mark.parametrize("known", [False, True], ids=["at random", "where nothing looks"])
@pytest.mark.parametrize("seed", range(4))
def test_a_few_loud_rows_are_caught_behind_decoys(seed: int, known: bool) -> None:
    stopped, checked, true = defended(loud_rows(seed, known))
    assert true > 1.0, "the adversary is harmless"
    assert stopped, f"checked {checked:.2f}, true {true:.2f}"

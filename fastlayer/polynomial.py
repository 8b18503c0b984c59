"""Degree-2 polynomial attention: coefficients, score statistics, the guard, the check of rows.

Far from the diagonal, attention's ``exp(s)`` is replaced by a quadratic in the score
``s = q.k * head_dim**-0.5``. A sum over keys of ``v (c0 + c1 s + c2 s^2)`` needs the keys only
through their moments, so causal attention becomes a scan over chunks of keys, linear in N:

    past_i = c0 sum v_j + c1 sum s_ij v_j + c2 sum s_ij^2 v_j    keys of earlier chunks
    near_i = sum exp(s_ij) v_j                                   keys j <= i of the row's own chunk
    out_i  = (past_i + near_i) / (the same sums with v = 1)

**Coefficients.** If scores are N(mu, sigma^2), the quadratic nearest to ``exp(s)`` in mean square
is its projection onto the Hermite polynomials of ``z = (s - mu) / sigma``. From the generating
function ``exp(sigma z - sigma^2 / 2) = sum_k He_k(z) sigma^k / k!`` and their orthogonality,

    exp(s) = exp(mu + sigma^2 / 2) * (He_0 + sigma He_1(z) + sigma^2 / 2 He_2(z) + ...)
           ~ exp(mu + sigma^2 / 2) * (1 - sigma^2 / 2 + t + t^2 / 2),   t = s - mu
           = exp(mu + sigma^2 / 2) * ((1 - sigma^2 / 2 - mu + mu^2 / 2) + (1 - mu) s + s^2 / 2)

The neglected part has relative mean square ``exp(sigma^2) - 1 - sigma^2 - sigma^4 / 2``. The factor
in front matters, for near scores are exact. The quadratic is positive everywhere for sigma < 1, so
no weight is ever negative below that.

The mean and spread may be those of all sampled rows of a head ("hermite"), or of each row itself
("rows", the default). A row's are exact and free, for they follow from the moments that its own
denominator needs, and they matter: queries differ in norm, and in their product with the mean key.
On one default layer (width 128, heads of 64, 12,288 tokens, CPU) the worst error fell from 5.1e-3
("hermite") to 1.2e-3. A row's spread counts as at most one, where positivity ends; its denominator
is then at least ``n exp(mu + sigma^2 / 2)`` and cannot vanish. Taylor's ``1 + s + s^2 / 2`` is
kept for comparison.

**Statistics.** The first two moments of a row's scores over earlier chunks need no scores: they are
``sum_j s_ij = q_i . sum_j k_j`` and ``sum_j s_ij^2 = q_i^T (sum_j k_j k_j^T) q_i``. They are taken
for ``GUARD_ROWS`` rows, one from each of as many equal stretches of the sequence, so that a drift
along it shows; the worst head and eighth of the sequence count.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch

#: Rows exact from the start of the sequence, and rows of a chunk (scores inside are exact).
EXACT_ROWS = 4096
CHUNK = 1024

#: Rows whose scores are measured, rows whose outputs are checked, and the seeds that place them.
GUARD_ROWS, CHECK_ROWS = 512, 64
_GUARD_SEED, _CHECK_SEED = 14, 41
_SEGMENTS = 8

#: Beyond these the arithmetic itself suffers, whatever the spread: ``1 - mu + mu^2 / 2`` cancels,
#: and products of two elements of q or k must stay within float16 (65,504).
MEAN_LIMIT = 1.0
NORM_LIMIT = 240.0

#: The worst checked row may use this share of its tolerance before the sample is recomputed, and a
#: calibrated threshold is where the whole model's worst element reaches ``CALIBRATED_BUDGET``.
CHECK_BUDGET = 0.5
CALIBRATED_BUDGET = 0.6

#: What a calibration must have measured: so many spreads in this range, the two around the crossing
#: no further apart; budgets below it may fall by so little, for float16 rounding is part of them.
CURVE_POINTS = 8
CURVE_RANGE = (0.2, 1.2)
CURVE_STEP = 0.05
CURVE_SLACK = 0.1

#: Of the acceptance rule that rows are checked by.
ATOL, RTOL = 0.002, 0.02

_GUARD_FILE = Path(__file__).with_name("polynomial_guard.json")
_KEYS_AT_ONCE = 8192
_HEADS_AT_ONCE = 4


def hermite(mean: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Least-squares coefficients ``[n, 4]`` for scores N(mean, sigma^2); both ``[n]`` float32.

    Columns: the logarithm of the factor in front, then c0, c1, c2 without it.
    """
    variance = sigma * sigma
    constant = 1.0 - variance / 2 - mean + mean * mean / 2
    return torch.stack(
        [mean + variance / 2, constant, 1.0 - mean, torch.full_like(mean, 0.5)], dim=1
    )


def taylor(mean: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Taylor's coefficients about zero, in the form of ``hermite``; the statistics are unused."""
    rows = torch.tensor([0.0, 1.0, 1.0, 0.5], dtype=mean.dtype, device=mean.device)
    return rows.expand(len(mean), 4).contiguous()


#: Coefficients by the name a launch gives them; None stands for each row's own.
COEFFICIENTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None] = {
    "rows": None,
    "hermite": hermite,
    "taylor": taylor,
}


def coefficients_of(kind: str, found: ScoreStatistics) -> torch.Tensor | None:
    """``[H, 4]`` for a layer, or None where each row has its own."""
    make = COEFFICIENTS[kind]
    return None if make is None else make(found.mean, found.sigma)


def truncation(sigma: float) -> float:
    """Root of the relative mean square that degree 2 neglects under N(mu, sigma^2)."""
    variance = sigma * sigma
    return math.sqrt(math.exp(variance) - 1.0 - variance - variance * variance / 2)


@lru_cache(maxsize=16)
def sampled_rows(
    first: int, tokens: int, count: int, seed: int, device: torch.device | str
) -> torch.Tensor:
    """At most ``count`` ascending rows of [first, tokens), one from each equal stretch; int64.

    The same tensor for the same arguments: not to be written to.
    """
    span = tokens - first
    count = min(count, span)
    edges = torch.arange(count, dtype=torch.float64) * span / count
    place = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rows = (edges + place * span / count).long().clamp_(max=span - 1)
    return (rows + first).to(device)


@dataclass(frozen=True, slots=True)
class KeyMoments:
    """Means over the keys of chunks 0 to c, for the C chunks that later ones look back on, float32.

    Attributes:
        linear, second: ``[H, C, D, D]``, of ``k v^T`` and of ``k k^T``.
        sums: ``[H, C, 2, D]``, of k and of v.
    """

    linear: torch.Tensor
    second: torch.Tensor
    sums: torch.Tensor

    def heads(self, part: slice) -> KeyMoments:
        return KeyMoments(self.linear[part], self.second[part], self.sums[part])


def running_means(parts: torch.Tensor, chunk: int) -> torch.Tensor:
    """Sums over each of C chunks ``[H, C, ...]`` to means over chunks 0 to c, in place."""
    seen = torch.arange(1, parts.shape[1] + 1, device=parts.device, dtype=torch.float32) * chunk
    return parts.cumsum_(1).div_(seen.view(-1, *[1] * (parts.dim() - 2)))


def key_moments(k: torch.Tensor, v: torch.Tensor, chunk: int = CHUNK) -> KeyMoments:
    """The moments of ``k, v [H, N, D]``: all chunks before the one that holds the last token."""
    heads, tokens, dim = k.shape
    past = (tokens - 1) // chunk
    keys, values = (t[:, : past * chunk].reshape(heads * past, chunk, dim).float() for t in (k, v))

    def means(parts: torch.Tensor) -> torch.Tensor:
        return running_means(parts.view(heads, past, -1, dim), chunk)

    return KeyMoments(
        means(torch.bmm(keys.transpose(1, 2), values)),
        means(torch.bmm(keys.transpose(1, 2), keys)),
        means(torch.stack([keys.sum(1), values.sum(1)], 1)),
    )


def along(t: torch.Tensor, vector: torch.Tensor | None) -> torch.Tensor:
    """``[H, N]`` float32: rows ``t [H, N, D]`` times their head's ``vector [H, D]`` or itself."""
    wide = t.float()
    if vector is None:
        return wide.square().sum(-1)
    return torch.matmul(wide, vector.float()[:, :, None])[:, :, 0]


@dataclass(frozen=True, slots=True)
class Operations:
    """What passes over all tokens of a layer: by torch here, by Triton in ``fastlayer.kernels``.

    Attributes:
        moments: ``(k, v)`` to ``KeyMoments``.
        along: see the function.
        exact_rows: see the function.
        read: float32 numbers ``[n]`` to the host, once they are computed.
    """

    moments: Callable[[torch.Tensor, torch.Tensor], KeyMoments]
    along: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    exact_rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    read: Callable[[torch.Tensor], list[float]]


def operations(chunk: int = CHUNK) -> Operations:
    """Everything in torch, for any device."""
    return Operations(
        lambda k, v: key_moments(k, v, chunk), along, exact_rows, lambda values: values.tolist()
    )


@dataclass(frozen=True, slots=True)
class Norms:
    """Squared norms of each query and key, ``[H, N]`` float32."""

    queries: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, by: Operations) -> Norms:
        return cls(by.along(q, None), by.along(k, None))


@dataclass(frozen=True, slots=True)
class ScoreStatistics:
    """Scores of one layer's sampled rows over the keys that a polynomial would stand for.

    Attributes:
        mean, sigma: ``[H]`` float32, pooled over all sampled rows: for the coefficients.
        worst_sigma: the largest spread of any head in any eighth of the sequence.
        worst_mean: the mean of largest magnitude, likewise.
        largest_norm: of any query or key, of all of them.
    """

    mean: torch.Tensor
    sigma: torch.Tensor
    worst_sigma: float
    worst_mean: float
    largest_norm: float


def score_statistics(
    q: torch.Tensor,
    past: KeyMoments,
    norms: Norms,
    *,
    first_row: int,
    chunk: int = CHUNK,
    by: Operations | None = None,
) -> ScoreStatistics:
    """Statistics of the scores of ``q [H, N, D]`` in the rows from ``first_row`` on.

    ``first_row`` is a positive multiple of ``chunk`` below N. Synchronises with the host once.
    Memory: the keys' second moments at each sampled row, float32.
    """
    heads, tokens, dim = q.shape
    rows = sampled_rows(first_row, tokens, GUARD_ROWS, _GUARD_SEED, q.device)
    before = rows // chunk - 1
    queries = q[:, rows].float() * dim**-0.5
    mean = (queries * past.sums[:, before, 0]).sum(-1)
    square = torch.empty_like(mean)
    for at in range(0, heads, _HEADS_AT_ONCE):
        group = slice(at, at + _HEADS_AT_ONCE)
        weighted = torch.matmul(queries[group, :, None], past.second[group, before])[:, :, 0]
        square[group] = (weighted * queries[group]).sum(-1)

    pieces = [*zip(mean.chunk(_SEGMENTS, 1), square.chunk(_SEGMENTS, 1), strict=True)]
    means = torch.stack([m.mean(1) for m, _ in pieces], 1)
    squares = torch.stack([s.mean(1) for _, s in pieces], 1)
    sigmas = (squares - means * means).clamp_min(0.0).sqrt()
    largest = torch.maximum(norms.queries.max(), norms.keys.max()).sqrt()
    worst = torch.stack([sigmas.max(), means.abs().max(), largest])
    pooled = mean.mean(1)
    sigma = (square.mean(1) - pooled * pooled).clamp_min(0.0).sqrt()
    return ScoreStatistics(pooled, sigma, *(by or operations(chunk)).read(worst))


@dataclass(frozen=True, slots=True)
class Survey:
    """What one look at a layer's q, k and v tells."""

    past: KeyMoments
    norms: Norms
    scores: ScoreStatistics


def survey(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    first_row: int,
    chunk: int = CHUNK,
    by: Operations | None = None,
) -> Survey:
    """Moments, norms and score statistics of ``q, k, v [H, N, D]``; see ``score_statistics``."""
    by = by or operations(chunk)
    past, norms = by.moments(k, v), Norms.of(q, k, by)
    found = score_statistics(q, past, norms, first_row=first_row, chunk=chunk, by=by)
    return Survey(past, norms, found)


@dataclass(frozen=True, slots=True)
class Guard:
    """Whether scores are tame enough for a quadratic. The threshold is measured, never assumed.

    Attributes:
        threshold: largest ``worst_sigma`` served by the polynomial, None before calibration.
        provenance: where the threshold comes from, or "uncalibrated".
    """

    threshold: float | None
    provenance: str

    def objection(self, found: ScoreStatistics) -> str:
        """Why this layer must be exact, or ""."""
        if self.threshold is None:
            return f"the guard is {self.provenance}"
        limits = (
            ("score spread", found.worst_sigma, self.threshold),
            ("score mean", found.worst_mean, MEAN_LIMIT),
            ("norm of a query or key", found.largest_norm, NORM_LIMIT),
        )
        for what, value, limit in limits:
            if not value <= limit:  # NaN is refused as well
                return f"{what} {value:.3g} beyond {limit:.3g}"
        return ""


@cache
def committed_guard() -> Guard:
    """The guard of ``polynomial_guard.json``, which a calibration writes.

    Raises:
        ValueError: the file holds a threshold that its own curve does not support.
    """
    return read_guard(_GUARD_FILE.read_text())


def read_guard(text: str) -> Guard:
    """The guard in a file's text: keys threshold, provenance, device, evidence and curve.

    Raises:
        ValueError: it is no such text, or the threshold is not at most what
            ``calibrated_threshold`` makes of the curve.
    """
    try:
        data = json.loads(text)
        threshold = data["threshold"]
        if threshold is None:
            return Guard(None, str(data["provenance"]))
        curve = [(float(sigma), float(budget)) for sigma, budget in data["curve"]]
        guard = Guard(float(threshold), f"calibrated on {data['device']}, {data['evidence']}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"polynomial_guard.json: given {error!r}; expected an object with threshold, "
            "provenance, device, evidence and a curve of (sigma, budget). Calibrate again."
        ) from error
    supported = calibrated_threshold(curve)
    if not 0.0 < guard.threshold <= supported:  # type: ignore[operator]
        raise ValueError(
            f"polynomial_guard.json: given threshold {threshold}; expected at most "
            f"{supported:.4f}, where its curve reaches the budget, and above 0. Calibrate again."
        )
    return guard


def calibrated_threshold(curve: Sequence[tuple[float, float]]) -> float:
    """The spread at which ``(sigma, budget_used)`` reaches ``CALIBRATED_BUDGET``.

    Between the two points around it the budget is interpolated linearly, so they must be near one
    another: budgets rise steeply and level off where softmax saturates, and a long chord may cross
    far beyond them.

    Raises:
        ValueError: the curve supports no threshold: fewer than ``CURVE_POINTS`` spreads within
            ``CURVE_RANGE``, a crossing that is missing, repeated or wider than ``CURVE_STEP``, or a
            budget that falls as spreads grow towards it.
    """
    points = sorted(curve)
    problem = _weakness(points)
    if problem:
        raise ValueError(
            f"calibration curve of {len(points)} points: {problem}; expected budgets that rise "
            f"from below to above {CALIBRATED_BUDGET} once, at {CURVE_POINTS} or more spreads from "
            f"{CURVE_RANGE[0]} to {CURVE_RANGE[1]}, at most {CURVE_STEP} apart where they cross. "
            "Calibrate with the default factors, or with more of them near the crossing."
        )
    (left, below), (right, above) = _crossing(points)
    return left + (right - left) * (CALIBRATED_BUDGET - below) / (above - below)


def _weakness(points: list[tuple[float, float]]) -> str:
    """Why the ascending ``(sigma, budget)`` support no threshold, or ""."""
    odd = [point for point in points if not all(0.0 <= value < math.inf for value in point)]
    if odd:
        return f"{odd[0]} is no spread and budget"
    inside = {sigma for sigma, _ in points if CURVE_RANGE[0] <= sigma <= CURVE_RANGE[1]}
    if len(inside) < CURVE_POINTS:
        return f"{len(inside)} spreads from {CURVE_RANGE[0]} to {CURVE_RANGE[1]}"
    budgets = [budget for _, budget in points]
    rising = [budget for budget in budgets if budget <= CALIBRATED_BUDGET]
    if budgets[: len(rising)] != rising:
        return f"the budget falls below {CALIBRATED_BUDGET} again"
    if not 0 < len(rising) < len(budgets):
        return "no crossing"
    for sofar, (sigma, budget) in zip(itertools.accumulate(rising, max), points, strict=False):
        if budget < sofar - CURVE_SLACK:
            return f"the budget falls from {sofar:.3g} to {budget:.3g} at spread {sigma:.3g}"
    (left, _), (right, _) = _crossing(points)
    if right - left > CURVE_STEP:
        return f"it crosses between spreads {left:.3g} and {right:.3g}"
    return ""


def _crossing(points: list[tuple[float, float]]) -> tuple[tuple[float, float], tuple[float, float]]:
    """The two neighbours around the budget."""
    return next(
        pair for pair in itertools.pairwise(points) if pair[0][1] <= CALIBRATED_BUDGET < pair[1][1]
    )


def check_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    norms: Norms,
    spread: torch.Tensor,
    *,
    first_row: int,
    by: Operations | None = None,
) -> torch.Tensor:
    """Rows to compare with exact attention: int64, not sorted, duplicates possible.

    ``CHECK_ROWS`` sampled over the sequence, and for each head the four rows most likely to be the
    worst: two whose own scores spread most (``spread [H, N]``, what ``polynomial_attention``
    returns: it saw every row), the query of largest norm, and the query that scores highest with
    the key of largest norm. A few loud rows, or a rare spike, escape a sample; not these.
    """
    heads, tokens, _ = q.shape
    sampled = sampled_rows(first_row, tokens, CHECK_ROWS, _CHECK_SEED, q.device)
    by_norm = norms.queries[:, first_row:].argmax(dim=1)
    key = norms.keys.argmax(dim=1)
    largest_key = k[torch.arange(heads, device=k.device), key]
    with_key = (by or operations()).along(q, largest_key)[:, first_row:]
    before = torch.arange(first_row, tokens, device=q.device) < key[:, None]
    by_key = with_key.masked_fill_(before, float("-inf")).argmax(dim=1)
    late = spread[:, first_row:]
    by_spread = late.topk(min(2, late.shape[1]), dim=1).indices.flatten()
    return torch.cat([sampled, by_norm + first_row, by_key + first_row, by_spread + first_row])


def exact_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Exact causal attention in float32 of the given ``rows [R]`` only: ``[H, R, D]``.

    Keys pass in blocks under a running maximum, so that memory is bounded.
    """
    heads, tokens, dim = k.shape
    queries = q[:, rows].float() * dim**-0.5
    top = torch.full((heads, len(rows), 1), float("-inf"), device=q.device)
    total = torch.zeros_like(top)
    result = torch.zeros_like(queries)
    for start in range(0, tokens, _KEYS_AT_ONCE):
        keys = k[:, start : start + _KEYS_AT_ONCE].float()
        scores = torch.matmul(queries, keys.transpose(1, 2))
        places = torch.arange(start, start + keys.shape[1], device=q.device)
        scores.masked_fill_(places > rows[:, None], float("-inf"))
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        # A row that has seen no key yet keeps -inf; its weights are exp(-inf - 0) = 0.
        base = higher.masked_fill(higher == float("-inf"), 0.0)
        weights = scores.sub_(base).exp_()
        shrink = (top - base).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        result = result * shrink + torch.matmul(
            weights, v[:, start : start + keys.shape[1]].float()
        )
        top = higher
    return result / total


def budget_used(candidate: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The worst element's share of its tolerance, a float32 scalar; inf where not finite."""
    difference = (candidate.float() - exact.float()).abs()
    share = difference / (RTOL * exact.float().abs()).clamp_min(ATOL)
    return torch.nan_to_num(share, nan=math.inf, posinf=math.inf).amax()


def polynomial_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    coefficients: torch.Tensor | None,
    *,
    first_row: int,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Writes rows from ``first_row`` on to ``out [H, N, D]``, in plain torch and float32.

    Returns the variance of each row's scores over earlier chunks, ``[H, N]``, zero before that.

    The algorithm of the Triton kernel, one head and chunk at a time: ``q, k, v [H, N, D]`` of any
    floating dtype, ``coefficients [H, 4]`` or None for each row's own, ``first_row`` a positive
    multiple of ``chunk``.
    """
    heads, tokens, dim = q.shape
    scale = dim**-0.5
    spread = torch.zeros(heads, tokens, device=q.device)
    for head in range(heads):
        keys_sum = torch.zeros(dim, device=q.device)
        values_sum = torch.zeros(dim, device=q.device)
        first = torch.zeros(dim, dim, device=q.device)
        moments = torch.zeros(dim, dim, device=q.device)
        second = torch.zeros(dim * dim, dim, device=q.device)
        for start in range(0, tokens, chunk):
            rows = slice(start, min(start + chunk, tokens))
            kc, vc = k[head, rows].float(), v[head, rows].float()
            if start >= first_row:
                qc = q[head, rows].float() * scale
                scores = qc @ kc.T
                future = torch.ones_like(scores, dtype=torch.bool).triu_(1)
                scores.masked_fill_(future, float("-inf"))
                mean = (qc @ keys_sum) / start
                square = ((qc @ moments) * qc).sum(1) / start
                spread[head, rows] = square - mean * mean
                if coefficients is None:
                    fit = hermite(mean, (square - mean * mean).clamp(0.0, 1.0).sqrt())
                else:
                    fit = coefficients[head].float().expand(len(qc), 4)
                log_scale, c0, c1, c2 = fit[:, :, None].unbind(1)
                # Everything is relative to exp(top), so that no spike overflows.
                top = torch.maximum(scores.amax(1, keepdim=True), log_scale)
                near = (scores - top).exp()
                past = (log_scale - top).exp()
                features = (qc[:, :, None] * qc[:, None, :]).reshape(len(qc), -1)
                numerator = c0 * values_sum + c1 * (qc @ first) + c2 * (features @ second)
                count = start * (c0 + c1 * mean[:, None] + c2 * square[:, None])
                weighted = past * numerator + near @ vc
                out[head, rows] = weighted / (past * count + near.sum(1, keepdim=True))
            if rows.stop < tokens:
                values_sum += vc.sum(0)
                keys_sum += kc.sum(0)
                first += kc.T @ vc
                moments += kc.T @ kc
                second += (kc[:, :, None] * kc[:, None, :]).reshape(len(kc), -1).T @ vc
    return spread

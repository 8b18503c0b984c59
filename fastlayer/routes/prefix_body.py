"""One sample through the whole model in bounded memory: what ``prefix_stream`` and ``stream`` run.

    out = x                                              float32 residual, in the output itself
    per layer:  q, k, v = Wqkv' n(out + s) + b'          float16 (or float32), all tokens
                context = attention(q, k, v)             exact, or the guarded polynomial
                out += Wo context                        float16 operands, float32 sums and result
                out += Wout gelu(Win' n(out + s) + b')
    out = n(out + s) * weight + bias

n is LayerNorm without its affine part, which is folded into the weight that reads it (W', b'), and
s the running sum of the biases that the residual has not been given (``folding``). Everything but
attention is per token and goes in blocks of rows; so besides q, k, v and the context, memory is a
matter of the block. Products that feed the residual leave their float32 accumulators as they are:
rounded to float16 there, they alone would cost more than the tolerance.

For the polynomial's kernels q and k are wanted with tokens contiguous. A matrix product writes its
result either way at the same price, so they are projected like that.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional as F

from fastlayer import polynomial
from fastlayer.config import TransformerConfig
from fastlayer.polynomial import CHECK_BUDGET, Guard
from fastlayer.routes.folding import FoldedLayer, accumulate, finish_, fold, normalise
from fastlayer.routes.long_attention import exact_attention
from fastlayer.weights import ModelState

#: Writes one sample's valid tokens, ``[n, d]`` float32, into the tensor it is given.
Load = Callable[[torch.Tensor], object]

#: Blocks are not halved below this many rows: what is out of memory then is not the blocks.
LEAST_ROWS = 256

#: Head widths of the Triton kernel, known here so that nothing imports Triton before it is used.
_KERNEL_HEAD_DIMS = (64,)


@dataclass(frozen=True, slots=True)
class Plan:
    """How samples are computed; ``PrefixStreamRoute.bind`` makes it from a launch.

    Attributes:
        dtype: of operands: float16 or float32.
        attention: "guarded", "exact", or "polynomial" (no guard, no fallback: for calibration).
        backend: of exact attention, see ``long_attention``.
        coefficients: "rows", "hermite" or "taylor", see ``polynomial``.
        rows: tokens of a block.
        exact_rows, chunk: the polynomial's exact prefix and its chunk, in rows.
        room: bytes that the polynomial's states may take.
        guard: what refuses the polynomial.
    """

    dtype: torch.dtype
    attention: str
    backend: str
    coefficients: str
    rows: int
    exact_rows: int
    chunk: int
    room: int
    guard: Guard


@dataclass(slots=True)
class Tally:
    """What the guard and the row check measured and decided during one call."""

    attention: str
    guard: Guard
    layers: dict[str, int] = field(default_factory=lambda: {"polynomial": 0, "exact": 0})
    reasons: dict[str, int] = field(default_factory=dict)
    sigma: float = math.nan
    mean: float = math.nan
    row_budget: float = math.nan
    recomputed: int = 0

    def saw(self, sigma: float, mean: float) -> None:
        self.sigma = sigma if math.isnan(self.sigma) else max(self.sigma, sigma)
        self.mean = mean if math.isnan(self.mean) else max(self.mean, mean)

    def exact(self, reason: str) -> None:
        self.layers["exact"] += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def text(self) -> str:
        """One line for ``last_decision``."""
        parts = [
            f"attention: {self.layers['polynomial']} layer runs polynomial, "
            f"{self.layers['exact']} exact"
        ]
        parts += [f"{count} because {reason}" for reason, count in self.reasons.items()]
        if not math.isnan(self.sigma):
            limit = self.guard.threshold
            against = "none" if limit is None else f"{limit:.3g}"
            parts.append(
                f"guard: worst score spread {self.sigma:.3f} (threshold {against}, "
                f"{self.guard.provenance}), worst mean {self.mean:.3f}"
            )
        if not math.isnan(self.row_budget):
            parts.append(
                f"row check: worst budget {self.row_budget:.3f} (limit {CHECK_BUDGET}), "
                f"{self.recomputed} samples recomputed exactly"
            )
        return "; ".join(parts)


def fixed_bytes(config: TransformerConfig, itemsize: int, irregular: bool = False) -> int:
    """Bytes that one sample takes whatever its blocks: q, k, v, the context, and a copy of it.

    An irregular mask adds the compacted sample in float32.
    """
    tokens = config.seq_len * config.d_model
    return tokens * (5 * itemsize + (4 if irregular else 0))


def row_bytes(config: TransformerConfig, itemsize: int) -> int:
    """Bytes that one row of a block takes: normalised, hidden and activated, and an update."""
    return config.d_model * (3 * 4 + itemsize) + 2 * config.ffn_dim * itemsize


class PrefixBody:
    """The forward pass of single samples over the present weights."""

    def __init__(
        self,
        state: ModelState,
        config: TransformerConfig,
        plan: Plan,
        notes: list[str] | None = None,
    ) -> None:
        """``notes`` takes what goes otherwise than planned; the model's own where None."""
        self._heads = config.num_heads
        self._rows = plan.rows
        self._room = plan.room
        self._state = state
        self._notes = state.notes if notes is None else notes
        layers = self._packed(plan.dtype)
        if not all(layer.fits for layer in layers):
            self._notes.append(
                "prefix_stream: a folded weight, or an activation that the weights allow, leaves "
                "float16's range or precision; float32 ran instead, and exact attention"
            )
            plan = replace(plan, dtype=torch.float32, attention="exact")
            layers = self._packed(plan.dtype)
        self._plan = plan
        self._layers = layers
        self._final = state.final_norm

    def _packed(self, dtype: torch.dtype) -> list[FoldedLayer]:
        key = ("prefix_stream", dtype)
        return self._state.get(key, lambda: fold(self._state.layers, dtype))

    def tally(self) -> Tally:
        return Tally(self._plan.attention, self._plan.guard)

    @torch.no_grad()
    def __call__(
        self, load: Load, out: torch.Tensor, tally: Tally, irregular: bool = False
    ) -> None:
        """Computes the sample that ``load`` writes, in ``out [n, d]`` itself.

        ``load`` is called anew when memory runs out, which halves the blocks, and when the row
        check fails, which makes attention exact.
        """
        exact = "the mask is irregular" if irregular else ""
        worst = self._attempt(load, out, tally, exact)
        if math.isnan(worst):
            return
        tally.row_budget = worst if math.isnan(tally.row_budget) else max(tally.row_budget, worst)
        if worst > CHECK_BUDGET and self._plan.attention == "guarded":
            tally.recomputed += 1
            self._attempt(load, out, tally, "checked rows were beyond their budget")

    def _attempt(self, load: Load, out: torch.Tensor, tally: Tally, exact: str) -> float:
        """One run, repeated in smaller blocks while memory runs out; the worst checked budget."""
        while True:
            try:
                load(out)
                return self._run(out, tally, exact)
            except torch.OutOfMemoryError:
                if self._rows <= LEAST_ROWS:
                    raise
                self._rows = max(LEAST_ROWS, self._rows // 2)
                self._room //= 2
                if out.is_cuda:
                    torch.cuda.empty_cache()
                self._notes.append(
                    f"out of memory: blocks of {self._rows} rows and half the states from now on"
                )

    def _run(self, h: torch.Tensor, tally: Tally, exact: str) -> float:
        budgets: list[torch.Tensor] = []
        for layer in self._layers:
            why = exact or self._why_exact(h)
            q, k, v = self._project(layer, h, by_column=h.is_cuda and not why)
            context = None
            if not why:
                context, why = self._polynomial(q, k, v, tally, layer, h, budgets)
            if context is None:
                tally.exact(why)
                context = exact_attention(q, k, v, self._plan.backend)
            del q, k, v
            for rows in self._blocks(h):
                _finish(layer, h[rows], context[rows])
            del context
        owed = self._layers[-1].owed
        for rows in self._blocks(h):
            finish_(h[rows], owed, self._final)
        if not budgets:
            return math.nan
        # One synchronisation a sample, not one a layer.
        (worst,) = self._operations(h).read(torch.stack(budgets).max()[None])
        return worst

    def _operations(self, t: torch.Tensor) -> polynomial.Operations:
        """What passes over all tokens, as it runs where ``t`` lies."""
        if not t.is_cuda:
            return polynomial.operations(self._plan.chunk)
        from fastlayer.kernels import polynomial as kernel

        return kernel.operations(self._plan.chunk)

    def _project(
        self, layer: FoldedLayer, h: torch.Tensor, by_column: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v ``[H, N, D]`` as views, q and k ``by_column`` or all of one packed tensor."""
        tokens, width = h.shape
        dtype = self._plan.dtype
        if not by_column:
            packed = h.new_empty(tokens, 3 * width, dtype=dtype)
            for rows in self._blocks(h):
                normed = normalise(h[rows], layer.shift1, dtype)
                _linear(normed, layer.qkv, layer.qkv_bias, packed[rows])
            q, k, v = (
                t.view(tokens, self._heads, -1).transpose(0, 1) for t in packed.split(width, dim=1)
            )
            return q, k, v
        # Zeros beyond the last token, up to a whole chunk: see ``kernels.polynomial``.
        columns = -(-tokens // self._plan.chunk) * self._plan.chunk
        across = h.new_empty(2 * width, columns, dtype=dtype)
        across[:, tokens:].zero_()
        values = h.new_empty(tokens, width, dtype=dtype)
        for rows in self._blocks(h):
            normed = normalise(h[rows], layer.shift1, dtype)
            torch.mm(layer.qkv[: 2 * width], normed.t(), out=across[:, rows])
            _linear(normed, layer.qkv[2 * width :], layer.qkv_bias[2 * width :], values[rows])
        # k does without: a bias along columns is a pass of its own, and softmax cannot tell it.
        across[:width, :tokens].add_(layer.qkv_bias[:width, None])
        q, k = (t.view(self._heads, -1, columns)[:, :, :tokens] for t in across.split(width))
        v = values.view(tokens, self._heads, -1).transpose(0, 1)
        return q.transpose(1, 2), k.transpose(1, 2), v

    def _blocks(self, h: torch.Tensor) -> list[slice]:
        # Ends are exact: a tensor padded beyond h is indexed by these as well.
        ends = range(self._rows, len(h) + self._rows, self._rows)
        return [slice(end - self._rows, min(end, len(h))) for end in ends]

    def _polynomial(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tally: Tally,
        layer: FoldedLayer,
        h: torch.Tensor,
        budgets: list[torch.Tensor],
    ) -> tuple[torch.Tensor | None, str]:
        """The context by the polynomial, checked in some rows; or None, and why the guard refuses.

        The worst budget of the layer's output in checked rows goes to ``budgets``.
        """
        plan = self._plan
        heads, tokens, dim = q.shape
        first, chunk = plan.exact_rows, plan.chunk
        by = self._operations(q)
        seen = polynomial.survey(q, k, v, first_row=first, chunk=chunk, by=by)
        found = seen.scores
        tally.saw(found.worst_sigma, found.worst_mean)
        refusal = plan.guard.objection(found) if plan.attention == "guarded" else ""
        if refusal:
            return None, refusal
        coefficients = polynomial.coefficients_of(plan.coefficients, found)
        context = torch.empty(tokens, heads * dim, dtype=q.dtype, device=q.device)
        context[:first] = exact_attention(q[:, :first], k[:, :first], v[:, :first], plan.backend)
        out = context.view(tokens, heads, dim).transpose(0, 1)
        if q.is_cuda:
            from fastlayer.kernels import polynomial as kernel

            spread = kernel.polynomial_attention(
                q,
                k,
                v,
                out,
                coefficients,
                first_row=first,
                chunk=chunk,
                heads_at_once=min(heads, self._heads_at_once(tokens, dim)),
                past=seen.past,
            )
        else:
            spread = polynomial.polynomial_attention(
                q, k, v, out, coefficients, first_row=first, chunk=chunk
            )
        tally.layers["polynomial"] += 1
        rows = polynomial.check_rows(q, k, seen.norms, spread, first_row=first, by=by)
        exact = by.exact_rows(q, k, v, rows).transpose(0, 1).reshape(len(rows), -1)
        ours, theirs = h[rows], h[rows]
        _finish(layer, ours, context[rows])
        _finish(layer, theirs, exact.to(context.dtype))
        budgets.append(polynomial.budget_used(ours + layer.owed, theirs + layer.owed))
        return context, ""

    def _why_exact(self, h: torch.Tensor) -> str:
        """Why this attention is exact before anything is measured, or ""."""
        plan = self._plan
        tokens, dim = len(h), h.shape[1] // self._heads
        if plan.attention == "exact":
            return "the launch asks for it"
        if plan.attention == "guarded" and plan.guard.threshold is None:
            return f"the guard is {plan.guard.provenance}"
        if tokens <= plan.exact_rows:
            return f"the first {plan.exact_rows:,} rows are exact in any case"
        if not h.is_cuda:
            return ""
        if dim not in _KERNEL_HEAD_DIMS:
            return f"the kernel takes head_dim {_KERNEL_HEAD_DIMS}, not {dim}"
        if plan.dtype != torch.float16:
            return f"the kernel takes float16, not {plan.dtype}"
        if not importlib.util.find_spec("triton"):
            return "triton is not installed"
        if not self._heads_at_once(tokens, dim):
            return f"{self._room:,} bytes of workspace do not hold one head's states"
        return ""

    def _heads_at_once(self, tokens: int, dim: int) -> int:
        """Heads whose states the workspace holds together."""
        from fastlayer.kernels.polynomial import workspace_per_head

        return self._room // workspace_per_head(tokens, dim, self._plan.chunk)


def _finish(layer: FoldedLayer, h: torch.Tensor, context: torch.Tensor) -> None:
    """The rest of a block for rows ``h [r, d]``, in place, from their context."""
    accumulate(h, context, layer.out)
    normed = normalise(h, layer.shift2, context.dtype)
    hidden = normed.new_empty(len(h), len(layer.ffn_in))
    _linear(normed, layer.ffn_in, layer.ffn_in_bias, hidden)
    del normed
    accumulate(h, F.gelu(hidden), layer.ffn_out)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    """``out = x W^T + b`` in x's dtype; on a CPU float16 is computed in float32 and rounded."""
    if x.is_cuda or x.dtype == torch.float32:
        torch.addmm(bias, x, weight.t(), out=out)
    else:
        out.copy_(F.linear(x.float(), weight.float(), bias.float()))

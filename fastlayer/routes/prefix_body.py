"""One sample through the whole model in bounded memory: what ``prefix_stream`` and ``stream`` run.

    out = x                                              float32 residual, in the output itself
    per layer:  qkv = Wqkv norm1(out) + b                float16 (or float32), all tokens
                context = attention(qkv)                 exact, or the guarded polynomial
                out += Wo context + b                    float16 operands, float32 sums and result
                out += Wout gelu(Win norm2(out) + b) + b
    out = final_norm(out)

Everything but attention is per token and goes in blocks of rows; so besides qkv and the context,
memory is a matter of the block. Products that feed the residual leave their float32 accumulators as
they are: rounded to float16 there, they alone would cost more than the tolerance.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from fastlayer import polynomial
from fastlayer.config import TransformerConfig
from fastlayer.polynomial import CHECK_BUDGET, Guard
from fastlayer.routes.long_attention import exact_attention
from fastlayer.weights import LayerWeights, ModelState

Affine = tuple[torch.Tensor, torch.Tensor]

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


@dataclass(frozen=True)
class PackedLayer:
    """One block's weights: matrices ``[out, in]`` in the compute dtype, the rest float32."""

    norm1: Affine
    qkv: Affine
    out: Affine
    norm2: Affine
    ffn_in: Affine
    ffn_out: Affine

    @classmethod
    def pack(cls, weights: LayerWeights, dtype: torch.dtype) -> PackedLayer:
        qkv, qkv_bias = weights.packed_qkv()
        return cls(
            norm1=weights.norm1,
            qkv=(qkv.to(dtype), qkv_bias.to(dtype)),
            out=(weights.out[0].to(dtype), weights.out[1]),
            norm2=weights.norm2,
            ffn_in=(weights.ffn_in[0].to(dtype), weights.ffn_in[1].to(dtype)),
            ffn_out=(weights.ffn_out[0].to(dtype), weights.ffn_out[1]),
        )


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

    def __init__(self, state: ModelState, config: TransformerConfig, plan: Plan) -> None:
        self._heads = config.num_heads
        self._plan = plan
        self._rows = plan.rows
        self._room = plan.room
        self._state = state
        self._layers = state.get(
            ("prefix_stream", plan.dtype),
            lambda: [PackedLayer.pack(weights, plan.dtype) for weights in state.layers],
        )
        self._final = state.final_norm

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
                self._state.notes.append(
                    f"out of memory: blocks of {self._rows} rows and half the states from now on"
                )

    def _run(self, h: torch.Tensor, tally: Tally, exact: str) -> float:
        budgets: list[torch.Tensor] = []
        for layer in self._layers:
            qkv = h.new_empty(len(h), 3 * h.shape[1], dtype=self._plan.dtype)
            for rows in self._blocks(h):
                normed = F.layer_norm(h[rows], h.shape[1:], *layer.norm1).to(self._plan.dtype)
                _linear(normed, layer.qkv, qkv[rows])
            q, k, v = (
                t.view(len(h), self._heads, -1).transpose(0, 1)
                for t in qkv.split(h.shape[1], dim=1)
            )
            context = None if exact else self._polynomial(q, k, v, tally)
            if exact:
                tally.exact(exact)
            if context is None:
                context = exact_attention(q, k, v, self._plan.backend)
            else:
                budgets.append(self._check(layer, h, q, k, v, context))
            del q, k, v, qkv
            for rows in self._blocks(h):
                _finish(layer, h[rows], context[rows])
            del context
        for rows in self._blocks(h):
            h[rows] = F.layer_norm(h[rows], h.shape[1:], *self._final)
        if not budgets:
            return math.nan
        # One synchronisation a sample, not one a layer.
        return float(torch.stack(budgets).max())

    def _blocks(self, h: torch.Tensor) -> list[slice]:
        return [slice(at, at + self._rows) for at in range(0, len(h), self._rows)]

    def _polynomial(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tally: Tally
    ) -> torch.Tensor | None:
        """The context by the guarded polynomial, or None, with the reason in the tally."""
        plan = self._plan
        heads, tokens, dim = q.shape
        reason = self._why_exact(q)
        if reason:
            tally.exact(reason)
            return None
        found = polynomial.score_statistics(q, k, first_row=plan.exact_rows, chunk=plan.chunk)
        tally.saw(found.worst_sigma, found.worst_mean)
        refusal = plan.guard.objection(found) if plan.attention == "guarded" else ""
        if refusal:
            tally.exact(refusal)
            return None
        coefficients = polynomial.coefficients_of(plan.coefficients, found)
        context = torch.empty(tokens, heads * dim, dtype=q.dtype, device=q.device)
        first = plan.exact_rows
        context[:first] = exact_attention(q[:, :first], k[:, :first], v[:, :first], plan.backend)
        out = context.view(tokens, heads, dim).transpose(0, 1)
        if q.is_cuda:
            from fastlayer.kernels import polynomial as kernel

            kernel.polynomial_attention(
                q,
                k,
                v,
                out,
                coefficients,
                first_row=first,
                chunk=plan.chunk,
                heads_at_once=min(heads, self._heads_at_once(tokens, dim)),
            )
        else:
            polynomial.polynomial_attention(
                q, k, v, out, coefficients, first_row=first, chunk=plan.chunk
            )
        tally.layers["polynomial"] += 1
        return context

    def _why_exact(self, q: torch.Tensor) -> str:
        """Why this attention is exact before anything is measured, or ""."""
        plan = self._plan
        _, tokens, dim = q.shape
        if plan.attention == "exact":
            return "the launch asks for it"
        if plan.attention == "guarded" and plan.guard.threshold is None:
            return f"the guard is {plan.guard.provenance}"
        if tokens <= plan.exact_rows:
            return f"the first {plan.exact_rows:,} rows are exact in any case"
        if not q.is_cuda:
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

    def _check(
        self,
        layer: PackedLayer,
        h: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        context: torch.Tensor,
    ) -> torch.Tensor:
        """The worst budget of the layer's output in checked rows, against exact attention."""
        rows = polynomial.check_rows(q, k, first_row=self._plan.exact_rows)
        exact = polynomial.exact_rows(q, k, v, rows).transpose(0, 1).reshape(len(rows), -1)
        ours, theirs = h[rows], h[rows]
        _finish(layer, ours, context[rows])
        _finish(layer, theirs, exact.to(context.dtype))
        return polynomial.budget_used(ours, theirs)


def _finish(layer: PackedLayer, h: torch.Tensor, context: torch.Tensor) -> None:
    """The rest of a block for rows ``h [r, d]``, in place, from their context."""
    h.add_(_wide(context, layer.out[0])).add_(layer.out[1])
    normed = F.layer_norm(h, h.shape[1:], *layer.norm2).to(context.dtype)
    hidden = normed.new_empty(len(h), len(layer.ffn_in[0]))
    _linear(normed, layer.ffn_in, hidden)
    h.add_(_wide(F.gelu(hidden), layer.ffn_out[0])).add_(layer.ffn_out[1])


def _linear(x: torch.Tensor, affine: Affine, out: torch.Tensor) -> None:
    """``out = x W^T + b`` in x's dtype; on a CPU float16 is computed in float32 and rounded."""
    weight, bias = affine
    if x.is_cuda or x.dtype == torch.float32:
        torch.addmm(bias, x, weight.t(), out=out)
    else:
        out.copy_(F.linear(x.float(), weight.float(), bias.float()))


def _wide(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x W^T`` in float32, whatever the operands' dtype."""
    if x.dtype == torch.float32:
        return F.linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())

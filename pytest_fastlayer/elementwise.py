"""The chunked kernel of the comparison: two tensors of one shape, dtype and device.

Per element, with ``d = |c - r|``:

- mode ``either``: passes if ``d <= atol`` or ``d <= rtol * |r|``,
- mode ``sum``: passes if ``d <= atol + rtol * |r|`` (torch.allclose),

so in both ``d <= allowed``, and ``d / allowed`` is the element's share of its budget. Integers
and booleans must be equal. A non-finite reference element is matched only by the same value.

Everything is computed in float64 (complex128, or exact integer equality), because in the
outputs' own types fp16 60000 - (-60000) is inf, uint8 200 - 201 is 255 and bf16 products round up.
No chunk's temporaries exceed about ``9 * 8`` bytes an element, hence the default chunk sizes.
Statistics stay on the device until one transfer at the end: a comparison of a CUDA tensor costs
one synchronisation, and a second pass with more of them only where something failed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Mode = Literal["either", "sum"]

#: Elements a chunk. On CUDA large enough to hide the launches (9 temporaries of float64 make
#: 144 MiB; complex ones are twice as wide, so their chunks are halved). On CPU torch's parallel
#: grain: in cache, and without waking the OpenMP pool thousands of times, which is slower and
#: stalls for seconds on a busy machine.
CUDA_CHUNK = 1 << 21
CPU_CHUNK = 1 << 15

#: Columns of a failing leaf that are listed by name.
MAX_COLUMNS = 65536


@dataclass
class LeafStatistics:
    """What one pair of tensors showed. Flat indices are in C order."""

    total: int = 0
    failed: int = 0
    nonfinite: int = 0  #: candidate NaN or inf where the reference is not the same value
    compared: int = 0  #: pairs finite in both arms
    max_abs: float = 0.0
    budget_used: float = 0.0
    worst: int | None = None  #: flat index of the largest share of the budget
    squared_error: float = 0.0  #: sum over the finite pairs
    candidate_nan: int = 0
    candidate_inf: int = 0
    reference_nan: int = 0
    reference_inf: int = 0
    first_nonfinite: int | None = None
    columns: dict[int, int] = field(default_factory=dict)  #: last dimension: column -> failures


def default_chunk(tensor: torch.Tensor) -> int:
    """Elements a chunk for this tensor's device and type."""
    chunk = CPU_CHUNK if tensor.device.type == "cpu" else CUDA_CHUNK
    return chunk // 2 if tensor.is_complex() else chunk


def blocks(shape: tuple[int, ...], limit: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Cut an index space into blocks of at most ``limit`` elements, contiguous in C order.

    Yields (flat offset, index); ``tensor[index]`` is a view whatever the strides, so cutting a
    non-contiguous output copies nothing.
    """
    total = math.prod(shape)
    if total == 0:
        return
    if total <= limit or not shape:
        yield 0, (...,)
        return
    inner = total // shape[0]
    if inner <= limit:
        step = max(1, limit // inner)
        for start in range(0, shape[0], step):
            yield start * inner, (slice(start, start + step),)
        return
    for row in range(shape[0]):
        for offset, rest in blocks(shape[1:], limit):
            yield row * inner + offset, (row, *rest)


def unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Multi-index of a flat C-order index."""
    result: list[int] = []
    for size in reversed(shape):
        index, position = divmod(index, size)
        result.append(position)
    return tuple(reversed(result))


def is_exact(dtype: torch.dtype) -> bool:
    """Integers and booleans, which are compared for equality."""
    return not (dtype.is_floating_point or dtype.is_complex)


def _wide(chunk: torch.Tensor) -> torch.Tensor:
    return chunk.to(torch.complex128 if chunk.is_complex() else torch.float64)


def _same(candidate: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Equal, or NaN in both; for complex numbers in both parts."""
    if candidate.is_complex():
        parts = _same(
            torch.view_as_real(candidate.resolve_conj()),
            torch.view_as_real(reference.resolve_conj()),
        )
        return parts.all(-1)
    return (candidate == reference) | (torch.isnan(candidate) & torch.isnan(reference))


def _allowed(magnitude: torch.Tensor, atol: float, rtol: float, mode: Mode) -> torch.Tensor:
    """Tolerance of each element. Takes ownership of ``magnitude`` (|r|, a temporary)."""
    scaled = magnitude.mul_(rtol)
    return scaled.add_(atol) if mode == "sum" else scaled.clamp_min_(atol)


@dataclass(frozen=True)
class Comparer:
    """The comparison of one pair of tensors under one tolerance."""

    candidate: torch.Tensor
    reference: torch.Tensor
    atol: float
    rtol: float
    mode: Mode
    chunk: int

    def run(self) -> LeafStatistics:
        """Both passes: the statistics of every element, then the diagnosis of what failed."""
        total = self.reference.numel()
        if total == 0:
            return LeafStatistics()
        offsets = [offset for offset, _, _ in self._chunks()]
        # One tensor for all rows, allocated before the loop: a small tensor kept from each chunk
        # would lie between the chunks' temporaries, and the heap would grow past the holes.
        table = torch.empty(len(offsets), 5, dtype=torch.float64, device=self.reference.device)
        for i, (_, c, r) in enumerate(self._chunks()):
            table[i] = self._exact_row(c, r) if is_exact(c.dtype) else self._row(c, r)[0]
        failed, unfinished, max_abs, budget, norms = table.cpu().unbind(1)
        chunk = int(budget.argmax())
        stats = LeafStatistics(
            total=total,
            failed=int(failed.sum()),
            compared=total - int(unfinished.sum()),
            max_abs=float(max_abs.max()),
            budget_used=max(0.0, float(budget.max())),
            squared_error=float(norms.square().sum()),
        )
        if stats.compared:
            stats.worst = offsets[chunk] + self._position_of_worst(chunk)
        suspicious = [i for i, n in enumerate((failed + unfinished).tolist()) if n]
        if suspicious:
            self._diagnose(stats, set(suspicious))
        return stats

    def _chunks(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        c, r = self.candidate, self.reference
        if c.is_contiguous() and r.is_contiguous():
            c, r = c.view(-1), r.view(-1)
        for offset, index in blocks(tuple(r.shape), self.chunk):
            yield offset, c[index], r[index]

    def _row(
        self, c: torch.Tensor, r: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(failed, not finite, max d, max budget, norm of d), budgets, finite flags.

        ``d`` is not finite when either arm is not, or when it overflows float64; the second pass
        tells them apart.
        """
        wide_r = _wide(r)
        d = (_wide(c) - wide_r).abs()
        allowed = _allowed(wide_r.abs(), self.atol, self.rtol, self.mode)
        finite = torch.isfinite(d)
        d.masked_fill_(~finite, 0.0)
        failed = ((d > allowed) & finite).sum()
        budget = d / allowed
        if self.atol == 0:
            budget.masked_fill_(d == 0, 0.0)  # 0 / 0: an exact zero uses no budget
        budget.masked_fill_(~finite, -1.0)
        row = (failed, (~finite).sum(), d.amax(), budget.amax(), torch.linalg.vector_norm(d))
        return torch.stack([value.to(torch.float64) for value in row]), budget, finite

    @staticmethod
    def _exact_row(c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        """As ``_row`` for integers: any difference is over budget without bound."""
        unequal = c != r
        # Integers above 2**53 may differ and yet agree in float64: a difference is at least 1.
        d = (c.to(torch.float64) - r.to(torch.float64)).abs().clamp_min_(1.0)
        d = d.masked_fill_(~unequal, 0.0)
        budget = torch.where(unequal.any(), math.inf, 0.0)
        row = (
            unequal.sum(),
            torch.zeros_like(budget),
            d.amax(),
            budget,
            torch.linalg.vector_norm(d),
        )
        return torch.stack([value.to(torch.float64) for value in row])

    def _chunk_at(self, wanted: int) -> tuple[torch.Tensor, torch.Tensor]:
        for i, (_, c, r) in enumerate(self._chunks()):
            if i == wanted:
                return c, r
        raise IndexError(wanted)

    def _position_of_worst(self, chunk: int) -> int:
        c, r = self._chunk_at(chunk)
        if is_exact(c.dtype):
            d = (c.to(torch.float64) - r.to(torch.float64)).abs().clamp_min_(1.0)
            return int(d.masked_fill_(c == r, 0.0).argmax())
        return int(self._row(c, r)[1].argmax())

    def _diagnose(self, stats: LeafStatistics, suspicious: set[int]) -> None:
        """Second pass over the chunks where something failed or was not finite."""
        width = self.reference.shape[-1] if self.reference.dim() else 1
        columns = torch.zeros(width, dtype=torch.int64, device=self.reference.device)
        nonfinite_failures = 0
        for i, (offset, c, r) in enumerate(self._chunks()):
            if i not in suspicious:
                continue
            bad = c != r
            if not is_exact(c.dtype):
                wide_c, wide_r = _wide(c), _wide(r)
                finite = torch.isfinite(wide_c) & torch.isfinite(wide_r)
                stats.candidate_nan += int(torch.isnan(wide_c).sum())
                stats.candidate_inf += int(torch.isinf(wide_c).sum())
                stats.reference_nan += int(torch.isnan(wide_r).sum())
                stats.reference_inf += int(torch.isinf(wide_r).sum())
                different = ~_same(wide_c, wide_r) & ~finite
                unmatched = different & ~torch.isfinite(wide_c)
                d = (wide_c - wide_r).abs()
                overflow = finite & torch.isinf(d)
                allowed = _allowed(wide_r.abs(), self.atol, self.rtol, self.mode)
                bad = (finite & (d > allowed)) | different
                nonfinite_failures += int(different.sum()) + int(overflow.sum())
                stats.nonfinite += int(unmatched.sum())
                if bool(overflow.any()):
                    stats.max_abs = stats.budget_used = math.inf
                    stats.compared += int(overflow.sum())
                    stats.worst = offset + int(overflow.reshape(-1).to(torch.int8).argmax())
                if stats.first_nonfinite is None and bool(different.any()):
                    flat = different.reshape(-1).to(torch.int8)
                    stats.first_nonfinite = offset + int(flat.argmax())
            where = torch.nonzero(bad.reshape(-1), as_tuple=True)[0]
            columns += torch.bincount((where + offset) % width, minlength=width)
        stats.failed += nonfinite_failures
        if width <= MAX_COLUMNS:
            hit = torch.nonzero(columns, as_tuple=True)[0]
            stats.columns = dict(zip(hit.tolist(), columns[hit].tolist(), strict=True))


def tally(
    candidate: torch.Tensor,
    reference: torch.Tensor,
    atol: float,
    rtol: float,
    mode: Mode,
    chunk: int,
) -> torch.Tensor:
    """(failed, worst budget) as float64 [2] on the tensors' device, without waiting for it.

    What is not finite fails unless the reference holds the same value, and has no budget; -1
    stands for no finite pair. Same shape, dtype and device; at least one element.
    """
    comparer = Comparer(candidate, reference, atol, rtol, mode, chunk)
    rows = []
    for _, c, r in comparer._chunks():
        if is_exact(c.dtype):
            row = comparer._exact_row(c, r)
            rows.append(torch.stack([row[0], row[3]]))
            continue
        row, _, finite = comparer._row(c, r)
        different = (~finite & ~_same(_wide(c), _wide(r))).sum()
        rows.append(torch.stack([row[0] + different, row[3]]))
    table = torch.stack(rows)
    return torch.stack([table[:, 0].sum(), table[:, 1].amax()])


def squared_error(
    candidate: torch.Tensor, reference: torch.Tensor, chunk: int | None = None
) -> tuple[float, int]:
    """Sum of |c - r| squared over the pairs finite in both, and their count; dtypes may differ."""
    if candidate.shape != reference.shape:
        raise ValueError(
            f"shapes differ: {tuple(candidate.shape)} against {tuple(reference.shape)}"
        )
    rows = []
    for _, index in blocks(tuple(reference.shape), chunk or default_chunk(reference)):
        d = (_wide(candidate[index]) - _wide(reference[index]).to(candidate.device)).abs()
        finite = torch.isfinite(d)
        norm = torch.linalg.vector_norm(d.masked_fill_(~finite, 0.0))
        rows.append(torch.stack([norm, finite.sum().to(torch.float64)]))
    if not rows:
        return 0.0, 0
    table = torch.stack(rows).cpu()
    return float(table[:, 0].square().sum()), int(table[:, 1].sum())

"""Is the candidate's output the reference's, element by element?

``compare`` checks structure, shape, dtype and device first, then every element (the rule and its
arithmetic are in ``elementwise``), and returns counts, the worst element by its share of the
tolerance, and what is needed to explain a failure. ``check_trials`` runs both arms over seeds.
Nothing here broadcasts, promotes or rounds in the outputs' own types.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from pytest_fastlayer import records
from pytest_fastlayer.accuracy_message import explain
from pytest_fastlayer.comparison import Comparison, Element, FailingColumns, Tolerance
from pytest_fastlayer.elementwise import (
    Comparer,
    LeafStatistics,
    default_chunk,
    is_exact,
    squared_error,
    unravel,
)
from pytest_fastlayer.outputs import Leaf, OutputError, as_tensor, leaves, map_tensors, tensors

__all__ = [
    "Comparison",
    "Element",
    "ElementwiseError",
    "OutputError",
    "Tolerance",
    "Trials",
    "assert_elementwise",
    "check_trials",
    "compare",
    "float64_twin",
    "to_record",
]

#: JSON has no infinity: a share of a zero tolerance is recorded as this.
MAX_BUDGET = 1e9


class ElementwiseError(AssertionError):
    """At least one element is out of tolerance; ``comparison`` holds the numbers."""

    def __init__(self, message: str, comparison: Comparison) -> None:
        super().__init__(message)
        self.comparison = comparison


def compare(
    candidate: object,
    reference: object,
    tolerance: Tolerance | None = None,
    *,
    chunk_elements: int | None = None,
    seed: int | None = None,
    truth: object = None,
) -> Comparison:
    """Compare two outputs of the same nesting; see the module's docstring.

    ``truth`` is a float64 evaluation of the reference with the same nesting; it is looked up at
    the worst element only, to say which arm is the one that is off. ``chunk_elements`` bounds the
    temporaries (about 72 bytes an element; the defaults stay under 256 MiB).

    Raises OutputError for sparse, jagged, quantized or meta tensors.
    """
    tolerance = tolerance or Tolerance()
    if chunk_elements is not None and chunk_elements < 1:
        raise ValueError(f"chunk_elements is {chunk_elements}: expected at least 1")
    result = Comparison(tolerance)
    truths = {leaf.path: leaf for leaf in leaves(truth)} if truth is not None else {}
    with torch.no_grad():
        unmatched = {leaf.path: leaf for leaf in leaves(candidate)}
        for r in leaves(reference):
            c = unmatched.pop(r.path, None)
            result = result.merge(_compare_leaf(c, r, tolerance, chunk_elements, seed, truths))
        for path in unmatched:
            text = f"structure: candidate has {path}, reference has nothing there"
            result = result.merge(_mismatch(tolerance, text))
    if seed is not None and (result.failed or result.mismatches):
        result = replace(result, failed_seeds=(seed,))
    return result


def assert_elementwise(
    candidate: object,
    reference: object,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    mode: Literal["either", "sum"] | None = None,
    seed: int | None = None,
    replay: str | None = None,
) -> Comparison:
    """Raise ElementwiseError unless every element of the candidate is within tolerance.

    Tolerances left out take the defaults of ``Tolerance``. Integer and boolean outputs must be
    equal. ``seed`` and ``replay`` (a command) are quoted in the message.
    """
    __tracebackhide__ = True
    given = {"atol": atol, "rtol": rtol, "mode": mode}
    tolerance = Tolerance(**{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
    comparison = compare(candidate, reference, tolerance, seed=seed)
    if not comparison.passed:
        raise ElementwiseError(explain(comparison, seed=seed, replay=replay), comparison)
    return comparison


@dataclass(frozen=True)
class Trials:
    """Accuracy over all seeds: the record, the merged comparison, and the message if it failed."""

    record: records.Accuracy
    comparison: Comparison
    message: str | None
    #: reference outputs by seed, for the callers that asked to keep them (probes reuse them)
    kept: dict[int, object] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.message is None


def check_trials(
    reference: Callable[..., object],
    candidate: Callable[..., object],
    inputs: Callable[[int], tuple[Any, ...]],
    seeds: Sequence[int],
    tolerance: Tolerance | None = None,
    *,
    float64: Callable[..., object] | None = None,
    float64_trials: int = 1,
    keep: int = 0,
    replay: str | None = None,
) -> Trials:
    """Run both arms on ``inputs(seed)`` for every seed and compare.

    ``float64`` evaluates the reference in float64 on the same inputs (see ``float64_twin``); the
    first ``float64_trials`` seeds use it to report the root-mean-square error of both arms.
    ``keep`` holds on to the reference's outputs of that many first seeds, so that the honesty
    probes need not run it again.
    """
    if not seeds:
        raise ValueError("no seeds: give at least one, or nothing is checked")
    tolerance = tolerance or Tolerance()
    merged = Comparison(tolerance)
    errors = {"candidate": [0.0, 0], "reference": [0.0, 0]}
    kept: dict[int, object] = {}
    for trial, seed in enumerate(seeds):
        args = inputs(seed)
        with torch.no_grad():
            expected = _apart(reference(*args), args)
            truth = float64(*args) if float64 is not None and trial < float64_trials else None
            actual = candidate(*args)
        one = compare(actual, expected, tolerance, seed=seed, truth=truth)
        merged = merged.merge(one)
        if truth is not None and not one.mismatches:
            for arm, output in (("candidate", actual), ("reference", expected)):
                total, count = _squared_error(output, truth)
                errors[arm][0] += total
                errors[arm][1] += count
        if trial < keep:
            kept[seed] = expected
        del args, expected, actual, truth
    rms = None
    if all(count for _, count in errors.values()):
        candidate_rms, reference_rms = (
            math.sqrt(errors[arm][0] / errors[arm][1]) for arm in ("candidate", "reference")
        )
        if math.isfinite(candidate_rms) and math.isfinite(reference_rms):
            rms = records.RootMeanSquare(candidate=candidate_rms, reference=reference_rms)
    record = to_record(merged, seeds, tolerance, rms)
    message = None if merged.passed else explain(merged, seeds=seeds, replay=replay, rms=rms)
    return Trials(record, merged, message, kept)


def _apart(output: Any, args: tuple[Any, ...]) -> Any:
    """An output in memory of its own: a reference may return its input, which an arm may write."""
    given = {_storage(tensor) for tensor in tensors(args)} - {0}
    if given.isdisjoint(map(_storage, tensors(output))):
        return output
    return map_tensors(output, lambda t: t.clone() if _storage(t) in given else t)


def _storage(tensor: torch.Tensor) -> int:
    """Address of the memory behind a tensor; 0 where there is none to be written."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper of other tensors
        return 0


def to_record(
    comparisons: Comparison | Iterable[Comparison],
    seeds: Sequence[int],
    tolerance: Tolerance | None = None,
    rms: records.RootMeanSquare | None = None,
) -> records.Accuracy:
    """The record of one comparison, or of several merged."""
    if isinstance(comparisons, Comparison):
        merged = comparisons
    else:
        merged = Comparison(tolerance or Tolerance())
        for one in comparisons:
            merged = merged.merge(one)
    failed, total = merged.failed, merged.total
    return records.Accuracy(
        trials=len(seeds),
        seeds=tuple(seeds),
        failed=failed,
        nonfinite=merged.nonfinite,
        total=total,
        max_abs=None if merged.max_abs is None else min(merged.max_abs, sys.float_info.max),
        budget_used=None if merged.budget_used is None else min(merged.budget_used, MAX_BUDGET),
        tolerance=(tolerance or merged.tolerance).record(),
        rms_vs_float64=rms,
    )


def float64_twin(reference: Callable[..., object]) -> Callable[..., object]:
    """The reference evaluated in float64: inputs and (a copy of) a module's parameters widened.

    A plain function is called on float64 inputs; if it casts to a narrower type inside, the
    result is only as good as that. Complex inputs become complex128; integers and booleans stay.
    """
    target = getattr(reference, "target", reference)
    if isinstance(target, torch.nn.Module):
        with torch.no_grad():
            target = copy.deepcopy(target).double().eval()

    def evaluate(*args: Any, **kwargs: Any) -> object:
        with torch.no_grad():
            return target(*map_tensors(args, _widened), **map_tensors(kwargs, _widened))

    return evaluate


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    if is_exact(tensor.dtype):
        return tensor
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _squared_error(output: object, truth: object) -> tuple[float, int]:
    total, count = 0.0, 0
    truths = {leaf.path: leaf for leaf in leaves(truth)}
    for leaf in leaves(output):
        a = as_tensor(leaf, "output")
        b = as_tensor(truths[leaf.path], "float64 evaluation")
        if a is None or b is None or is_exact(a.dtype):
            continue
        squares, elements = squared_error(a, b)
        total += squares
        count += elements
    return total, count


def _mismatch(tolerance: Tolerance, text: str, elements: int = 1) -> Comparison:
    elements = max(1, elements)
    return Comparison(tolerance, total=elements, failed=elements, mismatches=(text,))


def _compare_leaf(
    candidate: Leaf | None,
    reference: Leaf,
    tolerance: Tolerance,
    chunk: int | None,
    seed: int | None,
    truths: dict[str, Leaf],
) -> Comparison:
    """One leaf of the reference and the candidate's leaf at the same path, if there is one."""
    path = reference.path
    if candidate is None:
        return _mismatch(tolerance, f"structure: candidate has nothing where reference has {path}")
    c, r = as_tensor(candidate, "candidate"), as_tensor(reference, "reference")
    if c is None or r is None:
        if (c is None) != (r is None) or candidate.value != reference.value:
            return _mismatch(
                tolerance,
                f"{path}: candidate is {_brief(candidate.value)}, "
                f"reference is {_brief(reference.value)}",
            )
        return Comparison(tolerance)
    for what in ("shape", "dtype", "device"):
        given, expected = getattr(c, what), getattr(r, what)
        if given != expected:
            if what == "shape":
                given, expected = tuple(given), tuple(expected)
            text = f"{path}: candidate's {what} is {given}, reference's is {expected}"
            return _mismatch(tolerance, text, r.numel())
    stats = Comparer(
        c, r, tolerance.atol, tolerance.rtol, tolerance.mode, chunk or default_chunk(r)
    ).run()
    return _to_comparison(stats, path, c, r, tolerance, seed, truths.get(path))


def _to_comparison(
    stats: LeafStatistics,
    path: str,
    candidate: torch.Tensor,
    reference: torch.Tensor,
    tolerance: Tolerance,
    seed: int | None,
    truth: Leaf | None,
) -> Comparison:
    shape = tuple(reference.shape)
    true_output = None if truth is None else truth.value

    def element(flat: int | None) -> Element | None:
        if flat is None:
            return None
        index = unravel(flat, shape)
        true = None
        if isinstance(true_output, torch.Tensor) and tuple(true_output.shape) == shape:
            true = true_output[index].item()
        c, r = candidate[index].item(), reference[index].item()
        return Element(path, index, c, r, is_exact(reference.dtype), seed, true)

    columns: tuple[FailingColumns, ...] = ()
    if stats.columns and shape:
        counts = tuple(sorted(stats.columns.items()))
        columns = (FailingColumns(path, shape[-1], counts),)
    return Comparison(
        tolerance=tolerance,
        total=stats.total,
        failed=stats.failed,
        nonfinite=stats.nonfinite,
        compared=stats.compared,
        max_abs=stats.max_abs if stats.compared else None,
        budget_used=stats.budget_used if stats.compared else None,
        squared_error=stats.squared_error,
        worst=element(stats.worst),
        first_nonfinite=element(stats.first_nonfinite),
        candidate_nan=stats.candidate_nan,
        candidate_inf=stats.candidate_inf,
        reference_nan=stats.reference_nan,
        reference_inf=stats.reference_inf,
        columns=columns,
    )


def _brief(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} {value.dtype}"
    text = repr(value)
    return f"{text[:60]} ({type(value).__name__})"

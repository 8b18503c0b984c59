"""A stress grid: many seeds in every corner of the inputs that a pair promises to serve.

A pair is checked on a handful of seeds of one kind of input. ``--fastlayer-stress=SEEDS`` runs it
on a grid besides: each cell is a kind of input (so much padding, such a scale), usually at a size
that keeps a forward short. An element out of tolerance in a gated cell makes the case INCORRECT;
cells that are not gated, such as scales at which the reference itself is far from exact, are only
reported. Figures stay on the device until a cell is done: hundreds of short forwards would
otherwise wait for the host each time. The arms have inputs of their own, so that neither can spoil
the other's, and a candidate that writes to its own is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import JsonValue

from pytest_fastlayer import handed, records
from pytest_fastlayer.accuracy import MAX_BUDGET, Tolerance, compare
from pytest_fastlayer.accuracy_message import explain
from pytest_fastlayer.elementwise import default_chunk, tally
from pytest_fastlayer.fingerprint import BITS
from pytest_fastlayer.grids import INPUT_SCALES, PADDING_RATIOS
from pytest_fastlayer.outputs import as_tensor, leaves, map_tensors
from pytest_fastlayer.probes.inputs import mutated_by

#: Scales outside what a kernel meets in practice: reported, not gated.
UNGATED_SCALES = (0.1, 10.0)

Inputs = Callable[[int], Any]
Function = Callable[..., Any]


class StressError(ValueError):
    """A stress grid that checks nothing, or a reference that cannot be judged by."""


@dataclass(frozen=True)
class Cell:
    """One kind of input. ``inputs(seed)`` gives the arguments: a tuple, or one tensor."""

    label: str
    inputs: Inputs
    workload: Mapping[str, JsonValue] = field(default_factory=dict)
    gated: bool = True

    def __post_init__(self) -> None:
        handed.check(f"stress cell {self.label!r}", handed.CELL, vars(self))


@dataclass(frozen=True)
class Stress:
    """A grid, and what runs on it.

    Attributes:
        cells: The kinds of input, by unique labels.
        arms: ``arms(candidate)`` gives the (reference, candidate) of the grid, for instance the
            same weights at a smaller batch; called once, with the pair's candidate after it ran.
            None: the pair's own.
        describe: What ran, asked of the grid's candidate after each cell; a route's name.
        note: What the grid ran at, such as "batch 8".
    """

    cells: Sequence[Cell]
    arms: Callable[[Function], tuple[Function, Function]] | None = None
    describe: Callable[[Any], str] | None = None
    note: str = ""

    def __post_init__(self) -> None:
        handed.check("Stress", handed.STRESS, vars(self))
        for cell in self.cells:
            if not isinstance(cell, Cell):
                raise handed.HandedError(f"Stress: given {handed.shown(cell)}; expected a Cell")
        labels = [cell.label for cell in self.cells]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise StressError(f"two cells of the stress grid are labelled {twice[0]!r}")
        if not any(cell.gated for cell in self.cells):
            raise StressError("the stress grid has no gated cell: it could not fail")


def as_stress(given: Stress | Mapping[str, Inputs] | None) -> Stress | None:
    """The grid of a pair: as it is, or of ``{label: inputs}`` run by the pair's own arms."""
    if given is None or isinstance(given, Stress):
        return given
    if not isinstance(given, Mapping):
        raise handed.HandedError(
            f"stress: given {handed.shown(given)}; expected {{label: inputs}}, a Stress of cells "
            "(Stress([Cell(...), ...])), or None"
        )
    return Stress([Cell(label, inputs) for label, inputs in given.items()])


def padding_and_scale(
    make: Callable[[int, float, float], Any],
    padding_ratios: Sequence[float] = PADDING_RATIOS,
    input_scales: Sequence[float] = INPUT_SCALES,
    ungated_scales: Sequence[float] = UNGATED_SCALES,
) -> list[Cell]:
    """The usual grid: every padding ratio at every scale, and unpadded at the ungated scales.

    ``make(seed, padding_ratio, input_scale)`` gives the arguments.
    """

    def cell(ratio: float, scale: float, gated: bool) -> Cell:
        return Cell(
            f"padding {ratio:g}, scale {scale:.3g}",
            lambda seed: make(seed, ratio, scale),
            {"padding_ratio": ratio, "input_scale": scale},
            gated,
        )

    cells = [cell(ratio, scale, True) for ratio in padding_ratios for scale in input_scales]
    return cells + [cell(0.0, scale, False) for scale in ungated_scales]


@dataclass(frozen=True)
class Outcome:
    """The record, the explanation of the worst failure in a gated cell, and what was written to.

    ``message`` is empty where no gated cell failed; ``written`` names the first cell and seed in
    which the candidate wrote to its inputs, empty if it never did.
    """

    record: records.Stress
    message: str
    written: str = ""


def arms_of(stress: Stress, candidate: Function) -> tuple[Function, Function] | None:
    """The grid's own (reference, candidate), or None where it has none.

    Raises:
        HandedError: ``arms`` gave something else.
    """
    if stress.arms is None:
        return None
    given = stress.arms(candidate)
    if not (isinstance(given, tuple | list) and len(given) == 2 and all(map(callable, given))):
        raise handed.HandedError(
            f"the stress grid's arms gave {handed.shown(given)}; expected two callables, "
            "(reference, candidate)"
        )
    reference, own = given
    return reference, own


def run(
    stress: Stress,
    reference: Function,
    candidate: Function,
    seeds: Sequence[int],
    tolerance: Tolerance,
    progress: Callable[[str], None],
    replay: str = "",
    keep: Callable[[records.Stress], None] = lambda record: None,
) -> Outcome:
    """Both arms on every seed of every cell.

    ``keep`` is given what there is after each cell: all that is left where a later one raises.

    Raises:
        StressError: a cell's outputs hold no element, or the reference writes to its inputs.
        HandedError: ``describe`` gave something else than a str.
    """
    cells: list[records.StressCell] = []
    written = ""
    for index, cell in enumerate(stress.cells, 1):
        progress(f"stress, cell {index} of {len(stress.cells)}: {cell.label}")
        with torch.no_grad():
            found, writing = _cell(cell, reference, candidate, seeds, tolerance)
        if writing is not None and not written:
            written = f"in the stress grid, {cell.label}, seed {writing}"
        cells.append(found)
        keep(records.Stress.of(cells, seeds, stress.note))
        cells[-1] = found.model_copy(update={"route": _route(stress, cell, candidate)})
    record = records.Stress.of(cells, seeds, stress.note)
    keep(record)
    message = ""
    if record.failed:
        inputs = next(cell.inputs for cell in stress.cells if cell.label == record.cell)
        seed = record.seed or 0
        # Before the candidate is blamed: does the reference write to what it is given?
        problem = mutated_by(reference, _arguments(inputs, seed))
        if problem is not None:
            raise StressError(f"in the stress grid, {record.cell}, seed {seed}: {problem}")
        args, own = _twins(inputs, seed)
        with torch.no_grad():
            expected = reference(*own)
            again = compare(candidate(*args), expected, tolerance, seed=seed)
        message = f"in the stress grid, {record.cell}, seed {seed}:\n" + (
            explain(again, seeds=[seed], replay=replay)
            if not again.passed
            else "right when it was run again: the candidate is not a function of its inputs"
        )
    return Outcome(record, message, written)


def _route(stress: Stress, cell: Cell, candidate: Function) -> str | None:
    if stress.describe is None:
        return None
    route = stress.describe(candidate)
    if not isinstance(route, str):
        raise handed.HandedError(
            f"the stress grid's describe gave {handed.shown(route)} after cell {cell.label!r}; "
            "expected a str, the name of what ran"
        )
    return route


def _arguments(inputs: Inputs, seed: int) -> tuple[Any, ...]:
    given = inputs(seed)
    return tuple(given) if isinstance(given, tuple | list) else (given,)


def _twins(inputs: Inputs, seed: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments, and a copy of them in memory of its own."""
    args = _arguments(inputs, seed)
    return args, map_tensors(args, torch.clone)


def _cell(
    cell: Cell,
    reference: Function,
    candidate: Function,
    seeds: Sequence[int],
    tolerance: Tolerance,
) -> tuple[records.StressCell, int | None]:
    """One cell, and the first seed whose inputs the candidate wrote to.

    The host waits for the device once, at its end.
    """
    rows: list[torch.Tensor] = []  # of each seed: (failed, worst budget, whether inputs changed)
    elements = 0
    for seed in seeds:
        # What the candidate is given, what the reference is given, and what both began as.
        args, own = _twins(cell.inputs, seed)
        before = map_tensors(args, torch.clone)
        expected = reference(*own)
        row, count = _compared(candidate(*args), expected, tolerance)
        rows.append(torch.cat([row, _differ(args, before).to(row)]))
        elements += count
    if not elements:
        raise StressError(f"stress cell {cell.label!r}: the outputs hold no element to compare")
    devices = {row.device for row in rows}
    table = torch.stack(rows if len(devices) == 1 else [row.cpu() for row in rows])
    failed, budget, changed = table.cpu().unbind(1)
    # A failure that uses no finite budget (NaN) is worse than any that does.
    rank = torch.where(failed > 0, budget + MAX_BUDGET, budget)
    record = records.StressCell(
        label=cell.label,
        workload=dict(cell.workload),
        gated=cell.gated,
        elements=elements,
        failed=int(failed.sum()),
        budget_used=min(float(budget.max()), MAX_BUDGET) if bool((budget >= 0).any()) else None,
        seed=seeds[int(rank.argmax())],
    )
    return record, seeds[int(changed.argmax())] if bool(changed.any()) else None


def _differ(now: object, before: object) -> torch.Tensor:
    """Whether any argument is no longer what it was, as a tensor of one element, unread.

    Strided tensors are compared bit by bit where they are, others by their form alone.
    """
    ours, theirs = list(leaves(now)), list(leaves(before))
    if [leaf.path for leaf in ours] != [leaf.path for leaf in theirs]:
        return torch.ones(1)
    found: list[torch.Tensor] = []
    for one, other in zip(ours, theirs, strict=True):
        a, b = one.value, other.value
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            continue
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            return torch.ones(1)
        if a.layout == torch.strided and not a.is_quantized and a.numel():
            found.append((_bits(a) != _bits(b)).any().reshape(1))
    if not found:
        return torch.zeros(1)
    if len({one.device for one in found}) > 1:
        found = [one.cpu() for one in found]
    return torch.cat(found).any().reshape(1)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view(BITS[tensor.element_size()])


def _compared(
    candidate: object, reference: object, tolerance: Tolerance
) -> tuple[torch.Tensor, int]:
    """((failed, worst budget; -1 without a finite pair), elements) of one pair of outputs."""
    pairs = _pairs(candidate, reference)
    if not pairs:
        whole = compare(candidate, reference, tolerance)
        failed = max(whole.failed, len(whole.mismatches))
        budget = -1.0 if whole.budget_used is None else whole.budget_used
        return torch.tensor([failed, budget], dtype=torch.float64), whole.total
    atol, rtol, mode = tolerance.atol, tolerance.rtol, tolerance.mode
    rows = [tally(c, r, atol, rtol, mode, default_chunk(r)) for c, r in pairs]
    table = torch.stack(rows)
    return torch.stack([table[:, 0].sum(), table[:, 1].max()]), sum(r.numel() for _, r in pairs)


def _pairs(candidate: object, reference: object) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The outputs as tensors that can be compared where they are; else none.

    That is: of one structure, shapes and types, with elements, on one device, no plain values.
    """
    ours, theirs = list(leaves(candidate)), list(leaves(reference))
    if [leaf.path for leaf in ours] != [leaf.path for leaf in theirs]:
        return []
    found = []
    for one, other in zip(ours, theirs, strict=True):
        c, r = as_tensor(one, "candidate"), as_tensor(other, "reference")
        if c is None or r is None or not r.numel():
            return []
        if (c.shape, c.dtype, c.device) != (r.shape, r.dtype, r.device):
            return []
        found.append((c, r))
    return found if len({r.device for _, r in found}) == 1 else []

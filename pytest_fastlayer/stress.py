"""A stress grid: many seeds in every corner of the inputs that a pair promises to serve.

A pair is checked on a handful of seeds of one kind of input. ``--fastlayer-stress=SEEDS`` runs it
on a grid besides: each cell is a kind of input (so much padding, such a scale), usually at a size
that keeps a forward short. An element out of tolerance in a gated cell makes the case INCORRECT;
cells that are not gated, such as scales at which the reference itself is far from exact, are only
reported. Figures stay on the device until a cell is done: hundreds of short forwards would
otherwise wait for the host each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import JsonValue

from pytest_fastlayer import records
from pytest_fastlayer.accuracy import MAX_BUDGET, Tolerance, compare
from pytest_fastlayer.accuracy_message import explain
from pytest_fastlayer.elementwise import default_chunk, tally
from pytest_fastlayer.grids import INPUT_SCALES, PADDING_RATIOS
from pytest_fastlayer.outputs import as_tensor, leaves

#: Scales outside what a kernel meets in practice: reported, not gated.
UNGATED_SCALES = (0.1, 10.0)

Inputs = Callable[[int], Any]
Function = Callable[..., Any]


class StressError(ValueError):
    """A stress grid that checks nothing: no cell, two of one name, or empty outputs."""


@dataclass(frozen=True)
class Cell:
    """One kind of input. ``inputs(seed)`` gives the arguments: a tuple, or one tensor."""

    label: str
    inputs: Inputs
    workload: Mapping[str, JsonValue] = field(default_factory=dict)
    gated: bool = True


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
    """The record, and the explanation of the worst failure in a gated cell, empty if none."""

    record: records.Stress
    message: str


def run(
    stress: Stress,
    reference: Function,
    candidate: Function,
    seeds: Sequence[int],
    tolerance: Tolerance,
    progress: Callable[[str], None],
    replay: str = "",
) -> Outcome:
    """Both arms on every seed of every cell.

    Raises:
        StressError: a cell's outputs hold no element.
    """
    cells, described = [], stress.describe
    for index, cell in enumerate(stress.cells, 1):
        progress(f"stress, cell {index} of {len(stress.cells)}: {cell.label}")
        with torch.no_grad():
            found = _cell(cell, reference, candidate, seeds, tolerance)
        route = described(candidate) if described is not None else None
        cells.append(found.model_copy(update={"route": route}))
    record = records.Stress.of(cells, seeds, stress.note)
    message = ""
    if record.failed:
        inputs = next(cell.inputs for cell in stress.cells if cell.label == record.cell)
        seed = record.seed or 0
        args = _arguments(inputs, seed)
        with torch.no_grad():
            again = compare(candidate(*args), reference(*args), tolerance, seed=seed)
        message = f"in the stress grid, {record.cell}, seed {seed}:\n" + (
            explain(again, seeds=[seed], replay=replay)
            if not again.passed
            else "right when it was run again: the candidate is not a function of its inputs"
        )
    return Outcome(record, message)


def _arguments(inputs: Inputs, seed: int) -> tuple[Any, ...]:
    given = inputs(seed)
    return tuple(given) if isinstance(given, tuple | list) else (given,)


def _cell(
    cell: Cell,
    reference: Function,
    candidate: Function,
    seeds: Sequence[int],
    tolerance: Tolerance,
) -> records.StressCell:
    """One cell; the host waits for the device once, at its end."""
    rows: list[torch.Tensor] = []  # of each seed: (failed, worst budget)
    elements = 0
    for seed in seeds:
        args = _arguments(cell.inputs, seed)
        row, count = _compared(candidate(*args), reference(*args), tolerance)
        rows.append(row)
        elements += count
    if not elements:
        raise StressError(f"stress cell {cell.label!r}: the outputs hold no element to compare")
    devices = {row.device for row in rows}
    table = torch.stack(rows if len(devices) == 1 else [row.cpu() for row in rows])
    failed, budget = table.cpu().unbind(1)
    # A failure that uses no finite budget (NaN) is worse than any that does.
    rank = torch.where(failed > 0, budget + MAX_BUDGET, budget)
    return records.StressCell(
        label=cell.label,
        workload=dict(cell.workload),
        gated=cell.gated,
        elements=elements,
        failed=int(failed.sum()),
        budget_used=min(float(budget.max()), MAX_BUDGET) if bool((budget >= 0).any()) else None,
        seed=seeds[int(rank.argmax())],
    )


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

"""Registers, stack and shared memory of the polynomial kernels, compiled without a GPU.

    python -m fastlayer.kernels.polynomial_resources           # compare
    python -m fastlayer.kernels.polynomial_resources --write   # replace rows

``baselines/polynomial_resources.json`` holds a row for each toolchain, capability and kernel of
``PolynomialLaunch``'s defaults at case 14's width. Its rules are those of ``resources``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from fastlayer.kernels.compile import Resources, compile_kernel, resources
from fastlayer.kernels.polynomial import (
    HEAD_DIMS,
    Operands,
    PolynomialLaunch,
    Step,
    along_step,
    moments_step,
    rows_step,
    steps,
)
from fastlayer.kernels.resources import (
    SHARED_LIMITS,
    SHARED_SLACK,
    STACK_SLACK,
    Baseline,
    toolchain,
)
from fastlayer.kernels.sizes import power_of_two
from fastlayer.polynomial import CHECK_ROWS, CHUNK, EXACT_ROWS

BASELINE = Path("baselines/polynomial_resources.json")
CAPABILITIES = (80, 90, 120)

_TOKENS, _WIDTH, _HEADS = 100_000, 1024, 16


def hollow_steps(head_dim: int, launch: PolynomialLaunch) -> list[Step]:
    """Every launch of case 14 over tensors without storage, of the strides and dtypes there."""
    with torch.device("meta"):
        qkv = torch.empty(_TOKENS, 3 * _WIDTH, dtype=torch.float16)
        context = torch.empty(_TOKENS, _WIDTH, dtype=torch.float16)
        v = qkv[:, 2 * _WIDTH :].view(_TOKENS, _HEADS, head_dim).transpose(0, 1)
        out = context.view(_TOKENS, _HEADS, head_dim).transpose(0, 1)
        padded = -(-_TOKENS // CHUNK) * CHUNK
        past = (_TOKENS - 1) // CHUNK
        across = torch.empty(_HEADS, head_dim, padded, dtype=torch.float16)
        t = across[:, :, :_TOKENS].transpose(1, 2)
        mean = torch.empty(_HEADS, past, 1, dtype=torch.float16)
        single = torch.empty(_HEADS, past, 1)
        rows = CHECK_ROWS + 2 * _HEADS
        count = power_of_two(rows)
        queries = torch.empty(_HEADS, count, head_dim, dtype=torch.float16)
        places = torch.empty(count, dtype=torch.int32)
        partial = torch.empty(_HEADS, 1, count, head_dim)
    given = Operands(t, t, v, out, single, None, mean, mean, single, single, mean)
    return [
        *steps(given, first_row=EXACT_ROWS, chunk=CHUNK, launch=launch),
        moments_step(t, v, single, single, single, CHUNK),
        along_step(t, t, single, square=True),
        rows_step(queries, places, t, v, partial, single),
    ]


def measure(capability: int) -> Iterator[tuple[str, Resources]]:
    """``(name, what it takes)`` of each kernel for ``capability``."""
    for head_dim in HEAD_DIMS:
        for step in hollow_steps(head_dim, PolynomialLaunch()):
            tensors: tuple[torch.Tensor | int, ...] = step.tensors
            values = (*tensors, *step.scalars)
            compiled = compile_kernel(step.kernel, values, step.constants, step.options, capability)
            yield f"sm_{capability} {step.kernel.__name__} {head_dim}", resources(compiled)


def complaints(capability: int, name: str, found: Resources, baseline: Baseline) -> list[str]:
    """What is worse than the limits or the baseline; empty where nothing is."""
    limit = SHARED_LIMITS[capability]
    result = []
    if found.shared > limit:
        result.append(f"takes {found.shared:,} bytes of shared memory; a block may use {limit:,}")
    rows = baseline.get(toolchain(capability))
    if rows is None:
        return result
    if name not in rows:
        return [*result, "has no baseline; write it with --write"]
    for what, slack in (("stack", STACK_SLACK), ("shared", SHARED_SLACK)):
        now, then = getattr(found, what), rows[name][what]
        if now > then + slack:
            result.append(f"{what} grew from {then:,} to {now:,} bytes")
    return result


def read_baseline(path: Path = BASELINE) -> Baseline:
    rows: Baseline = json.loads(path.read_text())["toolchains"]
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fastlayer.kernels.polynomial_resources")
    parser.add_argument("--write", action="store_true", help="add or replace this toolchain's rows")
    parser.add_argument("--baseline", type=Path, default=BASELINE, metavar="FILE")
    options = parser.parse_args(arguments)
    baseline = read_baseline(options.baseline) if options.baseline.exists() else {}
    failed = 0
    written: Baseline = {}
    for capability in CAPABILITIES:
        rows = written.setdefault(toolchain(capability), {})
        for name, found in measure(capability):
            rows[name] = asdict(found)
            print(f"{name}: {found}", flush=True)
            for complaint in complaints(capability, name, found, {} if options.write else baseline):
                failed += 1
                print(f"  FAILED: {complaint}", flush=True)
    if options.write and not failed:
        text = {"schema_version": 1, "toolchains": baseline | written}
        options.baseline.write_text(json.dumps(text, indent=1, sort_keys=True) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

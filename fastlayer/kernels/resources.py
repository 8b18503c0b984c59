"""Registers, stack and shared memory of the fused kernels on every architecture they support.

    python -m fastlayer.kernels.resources            # compare with baselines/resources.json
    python -m fastlayer.kernels.resources --write    # replace it

No GPU is needed: Triton compiles for a named target. The baseline holds, for each version of Triton
and ptxas, a row for each capability, disclosed case and distinct kernel of a listed launch. A
version without rows allocates otherwise, so with it only shared memory, which the hardware limits,
is judged; ``--write`` adds or replaces the rows of the versions at hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from fastlayer.cases import CASES
from fastlayer.kernels import products, rowwise
from fastlayer.kernels.compile import (
    Resources,
    compile_kernel,
    compile_step,
    hollow_program,
    ptxas_version,
    resources,
)
from fastlayer.kernels.knobs import Launch, sizes_for
from fastlayer.kernels.launches import CAPABILITIES, COMPILED, MEASURED
from fastlayer.kernels.warm import WarmLaunch

BASELINE = Path("baselines/resources.json")

#: Bytes of shared memory that one block may use, by compute capability (CUDA C++ Programming Guide,
#: technical specifications per compute capability: the limit a block may opt in to).
SHARED_LIMITS: dict[int, int] = {
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
}

#: Toolchain to variant to resource to amount.
Baseline = dict[str, dict[str, dict[str, int]]]

#: Growth that does not fail a comparison: ptxas moves this much over unrelated edits.
STACK_SLACK = 32
SHARED_SLACK = 0


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel to compile. ``part`` tells apart the kernels of a launch that has several."""

    capability: int
    case: int
    launch: Launch
    maximum: bool
    part: int

    @property
    def name(self) -> str:
        knobs = ",".join(f"{key}={value}" for key, value in self.launch.as_dict().items())
        softmax = "" if self.maximum else " no maximum"
        return f"sm_{self.capability} case {self.case} {knobs}{softmax} part {self.part}"


@dataclass(frozen=True, slots=True)
class HalfVariant:
    """A kernel of ``half_gemm``, as ``case`` compiles it."""

    capability: int
    case: int
    kernel: str

    @property
    def name(self) -> str:
        return f"sm_{self.capability} case {self.case} half_gemm {self.kernel}"


#: The disclosed case that ``half_gemm`` is for, and its kernels.
_HALF_CASE = 8
_HALF_KERNELS = ("normalise", "finish", "activated", "attend")


def variants(capability: int) -> Iterator[Variant | HalfVariant]:
    """Every kernel that the listed launches of a capability would compile, each once."""
    for kernel in _HALF_KERNELS:
        yield HalfVariant(capability, _HALF_CASE, kernel)
    table = MEASURED.get(divmod(capability, 10), COMPILED)
    for case, rows in table.items():
        for row in rows:
            for part in (0, 1, CASES[case].num_layers) if row.launch.form == "layers" else (0,):
                # The disclosed weights prove that a softmax over all keys at once needs no maximum.
                maximum = not row.launch.takes_keys_at_once(sizes_for(row.launch, CASES[case]))
                yield Variant(capability, case, row.launch, maximum, part)


def measure(variant: Variant | HalfVariant) -> Resources:
    if isinstance(variant, HalfVariant):
        return _measure_half(variant)
    program = hollow_program(variant.launch, CASES[variant.case], maximum=variant.maximum)
    return resources(compile_step(program.steps[variant.part], variant.capability))


def _measure_half(variant: HalfVariant) -> Resources:
    config, capability = CASES[variant.case], variant.capability
    d, half, single = config.d_model, torch.empty(0, dtype=torch.float16), torch.empty(0)
    tile = products.tile_for((capability // 10, capability % 10))
    known: dict[str, tuple[Any, WarmLaunch, tuple[torch.Tensor, ...]]] = {
        "normalise": (
            rowwise.normalise_kernel,
            rowwise.launch_of(config.tokens, d, COPY=True),
            (single, single, half, single),
        ),
        "finish": (
            rowwise.finish_kernel,
            rowwise.launch_of(config.tokens, d),
            (single, single, single, single, single),
        ),
        "activated": (
            products.linear_kernel,
            products.linear_launch(config.tokens, config.ffn_dim, d, tile),
            (half, half, half, half),
        ),
        "attend": (
            products.attend_kernel,
            products.attend_launch(
                config.batch_size, config.seq_len, config.num_heads, config.head_dim, config.causal
            ),
            (half, half),
        ),
    }
    kernel, launch, tensors = known[variant.kernel]
    values: tuple[torch.Tensor | int, ...] = (*tensors, *launch.scalars)
    return resources(
        compile_kernel(kernel, values, launch.constants, launch.options, variant.capability)
    )


def toolchain(capability: int) -> str:
    """What allocates registers: the versions of Triton and of the ptxas it would call."""
    return f"triton {triton.__version__}, ptxas {ptxas_version(capability)}"


def complaints(variant: Variant | HalfVariant, found: Resources, baseline: Baseline) -> list[str]:
    """What is worse than the limits or the baseline; empty where nothing is."""
    limit = SHARED_LIMITS[variant.capability]
    result = []
    if found.shared > limit:
        result.append(f"takes {found.shared:,} bytes of shared memory; a block may use {limit:,}")
    rows = baseline.get(toolchain(variant.capability))
    if rows is None:
        return result
    row = rows.get(variant.name)
    if row is None:
        return [*result, "has no baseline; run python -m fastlayer.kernels.resources --write"]
    for field, slack in (("stack", STACK_SLACK), ("shared", SHARED_SLACK)):
        now, then = getattr(found, field), row[field]
        if now > then + slack:
            result.append(f"{field} grew from {then:,} to {now:,} bytes")
    return result


def read_baseline(path: Path = BASELINE) -> Baseline:
    rows: Baseline = json.loads(path.read_text())["toolchains"]
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fastlayer.kernels.resources")
    parser.add_argument("--write", action="store_true", help="replace the baseline")
    parser.add_argument("--baseline", type=Path, default=BASELINE, metavar="FILE")
    parser.add_argument(
        "--capability", type=int, choices=CAPABILITIES, action="append", help="only this one"
    )
    options = parser.parse_args(arguments)
    baseline = read_baseline(options.baseline) if options.baseline.exists() else {}
    found: Baseline = {}
    failed = 0
    for capability in options.capability or CAPABILITIES:
        rows = found.setdefault(toolchain(capability), {})
        for variant in variants(capability):
            taken = measure(variant)
            rows[variant.name] = asdict(taken)
            print(f"{variant.name}: {taken}", flush=True)
            for complaint in complaints(variant, taken, {} if options.write else baseline):
                failed += 1
                print(f"  FAILED: {complaint}", flush=True)
    if options.write and not failed:
        for tools, rows in found.items():
            baseline[tools] = rows if not options.capability else baseline.get(tools, {}) | rows
        text = json.dumps({"schema_version": 1, "toolchains": baseline}, indent=1, sort_keys=True)
        options.baseline.write_text(text + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compiling kernel launches for a GPU that need not be there, and reading what they take.

Triton needs no device to make machine code: the target is an argument. What is compiled here is
what a launch would compile on that device: the same constants and the same facts about its
arguments (an integer of one is a constant; pointers and multiples of sixteen are known as such).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastlayer.config import TransformerConfig
from fastlayer.kernels.knobs import Launch, sizes_for
from fastlayer.kernels.launch import Program, Step, Workspace, operands
from fastlayer.kernels.packing import FusedWeights

_TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.int32: "*i32"}
_ALIGNED = [["tt.divisibility", 16]]
_WARP = 32


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes: registers a thread, stack and shared memory in bytes."""

    registers: int
    stack: int
    shared: int


def hollow_program(
    launch: Launch, config: TransformerConfig, *, maximum: bool, masked: bool = False
) -> Program:
    """A program to compile and never to run: its tensors hold nothing, only their types matter."""
    half, single = torch.empty(0, dtype=torch.float16), torch.empty(0)
    sizes = sizes_for(launch, config)
    shapes = {
        "qkv": (sizes.num_layers, sizes.width, 3 * sizes.heads_width),
        "out": (sizes.num_layers, sizes.heads_width, sizes.width),
        "ffn_in": (sizes.num_layers, sizes.width, sizes.hidden),
        "ffn_out": (sizes.num_layers, sizes.hidden, sizes.width),
    }
    weights = FusedWeights(
        **{name: half.new_empty(shape) for name, shape in shapes.items()},
        biases=single,
        final=single,
        score_bounds=(float("inf") if maximum else 0.0,),
        overflow=False,
    )
    workspace = Workspace(half, torch.empty(0, dtype=torch.int32))
    return Program(launch, sizes, operands(launch, sizes, weights), workspace, masked)


def compile_step(step: Step, capability: int) -> Any:
    """Triton's compiled kernel of ``step`` for compute capability ``capability`` (90 for 9.0)."""
    activation = torch.empty(0)
    lengths = torch.empty(0, dtype=torch.int32) if step.constants["LENGTHS"] else activation
    tensors: tuple[torch.Tensor | int, ...] = step.arguments(activation, activation, lengths)
    values = (*tensors, *step.scalars)
    return compile_kernel(step.kernel, values, step.constants, step.options, capability)


def compile_kernel(
    kernel: Any,
    values: tuple[torch.Tensor | int, ...],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    capability: int,
) -> Any:
    """What ``kernel(*values, **constants, **options)`` compiles; of tensors only dtypes matter."""
    names = kernel.arg_names
    signature: dict[str, str] = {}
    fixed: dict[str, Any] = dict(constants)
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, (name, value) in enumerate(zip(names, values, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            attributes[(index,)] = _ALIGNED
        elif value == 1:
            signature[name] = "constexpr"
            fixed[name] = 1
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(index,)] = _ALIGNED
    signature |= {name: "constexpr" for name in names if name in constants}
    source = ASTSource(kernel, signature, fixed, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, _WARP), options=options)


def resources(compiled: Any) -> Resources:
    """Read off the machine code by ``cuobjdump``, which Triton's own package carries."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "--dump-resource-usage", str(path)], check=True, capture_output=True, text=True
        ).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", text))
    return Resources(int(found["REG"]), int(found["STACK"]), int(compiled.metadata.shared))


def ptxas_version(capability: int) -> str:
    """Version of the ptxas that Triton calls for a capability: one of its own for Blackwell."""
    tools = triton.knobs.nvidia
    tool = tools.ptxas_blackwell if capability >= 100 else tools.ptxas
    return str(tool.version)

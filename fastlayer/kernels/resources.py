"""Registers, stack and shared memory of every fused kernel, for every supported architecture.

    python -m fastlayer.kernels.resources            # compare with baselines/resources.json
    python -m fastlayer.kernels.resources --write    # replace it

No GPU is needed: Triton compiles for a named target. The baseline holds one row for each variant of
``VARIANTS`` and each capability of ``SHARED_LIMITS``, and the Triton and ptxas versions it was read
with: other versions allocate registers otherwise, so a comparison across versions checks only the
limits of the hardware.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from fastlayer.kernels.compile import Resources, compile_step, resources
from fastlayer.kernels.knobs import Launch
from fastlayer.kernels.launch import Step, Workspace, operands, steps
from fastlayer.kernels.launches import VARIANTS, Variant, launch_for
from fastlayer.kernels.packing import FusedWeights
from fastlayer.kernels.sizes import FusedSizes

BASELINE = Path("baselines/resources.json")

#: Bytes of shared memory one block may use, by compute capability (CUDA C++ Programming Guide,
#: table of technical specifications per compute capability).
SHARED_LIMITS: dict[int, int] = {
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
}
"""

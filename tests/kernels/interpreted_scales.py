"""Runs the models of ``scaled_models`` through fused kernels in Triton's interpreter.

A JSON line for each. A process of its own, for the reason that ``interpreted`` gives.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from scaled_models import CONFIG, scaled

from fastlayer.kernels.knobs import Launch, sizes_for
from fastlayer.kernels.launch import program
from fastlayer.kernels.packing import pack

LAUNCHES = (
    Launch("single", rows=64),
    Launch("wavefront", rows=32, keys=64, qkv_chunk=32, chunk=32),
    Launch("strips", rows=16, qkv_chunk=32, chunk=32),
)

#: One of each kind: the interpreter is slow.
NAMES = (
    "v times 150000",
    "v by channel",
    "q by channel",
    "k's bias plus 300",
    "v's bias plus 1e+06",
    "hidden times 100",
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in NAMES:
        model = scaled(name)
        x = torch.randn(CONFIG.batch_size, CONFIG.seq_len, CONFIG.d_model)
        with torch.no_grad():
            expected = model(x)
        for launch in LAUNCHES:
            weights = pack(model.state_dict(), sizes_for(launch, CONFIG))
            forward = program(launch, CONFIG, weights, masked=False, device="cpu")
            out = torch.full_like(x, float("nan"))
            forward(x, out, None)
            error = (out - expected).abs() / (0.02 * expected.abs()).clamp_min(0.002)
            row = {"finite": bool(out.isfinite().all()), "budget": float(error.max())}
            print(json.dumps({"name": f"{launch.form}: {name}", **row}), flush=True)

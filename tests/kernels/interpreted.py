"""Runs every kernel form in Triton's interpreter on reduced shapes; a JSON line for each check.

A process of its own: whether a kernel is interpreted is decided when its module is imported.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

os.environ["TRITON_INTERPRET"] = "1"

import torch

from fastlayer import ReferenceTransformer, TransformerConfig
from fastlayer.kernels import packing, products, products_proof, rowwise
from fastlayer.kernels.knobs import Launch, sizes_for
from fastlayer.kernels.launch import program
from fastlayer.kernels.packing import FusedWeights, pack
from fastlayer.kernels.proof import Claim, prove_here
from fastlayer.kernels.sizes import FusedSizes

ATOL, RTOL = 0.002, 0.02


@dataclass(frozen=True)
class Check:
    """One model, one launch, one mask. ``maximum`` False runs the softmax without its maximum."""

    config: TransformerConfig
    launch: Launch
    padded: bool = False
    maximum: bool = True


def _model(b: int, n: int, d: int, h: int, f: int, causal: bool = True) -> TransformerConfig:
    return TransformerConfig(b, n, d, h, f, 2, causal)


_SINGLE = Launch("single", rows=64)
_TILES = Launch("wavefront", rows=32, keys=64, qkv_chunk=32, chunk=32)
_LAYERS = replace(_TILES, form="layers")
_STRIPS = Launch("strips", rows=16, qkv_chunk=32, chunk=32)

#: The regimes of the disclosed shapes, reduced: heads of 8, 16, 32 and 64 columns, one head, tiles
#: that a sequence fills and that it does not, several sequences a tile, keys in several blocks.
CHECKS: dict[str, Check] = {
    "single": Check(_model(2, 64, 32, 2, 32), _SINGLE),
    "single, packed, heads of 8": Check(_model(5, 17, 32, 4, 32), _SINGLE, padded=True),
    "single, d=96, three heads, full": Check(
        _model(3, 17, 96, 3, 192, False), _SINGLE, padded=True
    ),
    "single, one token": Check(_model(3, 1, 16, 1, 16), _SINGLE),
    "single, no maximum": Check(_model(2, 32, 32, 2, 32), _SINGLE, maximum=False),
    "single, erf": Check(_model(2, 32, 32, 2, 48), replace(_SINGLE, exact_gelu=True)),
    "wavefront": Check(_model(2, 64, 32, 4, 32), _TILES),
    "wavefront, ragged, one head": Check(_model(2, 150, 64, 1, 32), _TILES, padded=True),
    "wavefront, by tile, no maximum": Check(
        _model(3, 100, 32, 2, 32), replace(_TILES, by_tile=True, flat=True), maximum=False
    ),
    "layers": Check(_model(2, 100, 32, 2, 32), _LAYERS),
    "layers, full, heads of 8": Check(_model(3, 150, 32, 4, 32, False), _LAYERS, padded=True),
    "layers, full, one block": Check(_model(2, 60, 64, 2, 32, False), _LAYERS, padded=True),
    "layers, projected apart": Check(
        _model(2, 100, 32, 4, 32), replace(_LAYERS, apart=True), padded=True
    ),
    "strips": Check(_model(2, 64, 32, 4, 32), _STRIPS, padded=True),
    "strips, two passes, ragged": Check(
        _model(2, 37, 64, 4, 128), replace(_STRIPS, rows=32, passes=2)
    ),
    "strips, no maximum, late weights": Check(
        _model(3, 32, 32, 2, 32), replace(_STRIPS, early=False, warps=2), padded=True, maximum=False
    ),
}  # fmt: skip


def run(check: Check) -> dict[str, object]:
    config, launch = check.config, check.launch
    torch.manual_seed(1234)
    model = ReferenceTransformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Default biases are small and norms trivial: a wrong fold would not show.
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    sizes = sizes_for(launch, config)
    assert not launch.objections(sizes), launch.objections(sizes)
    x = torch.randn(config.batch_size, config.seq_len, config.d_model)
    lengths = mask = None
    if check.padded:
        lengths = torch.randint(0, config.seq_len + 1, (config.batch_size,), dtype=torch.int32)
        lengths[0], lengths[-1] = 0, config.seq_len
        mask = torch.arange(config.seq_len)[None] < lengths[:, None]
    with torch.no_grad():
        expected = model(x, mask)
    if mask is not None:
        # What lies in padding may be anything.
        x = torch.where(mask[:, :, None], x, float("nan"))
    weights = replace(
        pack(model.state_dict(), sizes), score_bounds=(99.0 if check.maximum else 0.0,)
    )
    forward = program(launch, config, weights, masked=lengths is not None, device="cpu")
    out = torch.full_like(x, float("nan"))
    # Twice: the second launch finds the flags of the first.
    for _ in range(2):
        out.fill_(float("nan"))
        forward(x, out, lengths)
    error = (out - expected).abs() / torch.clamp(RTOL * expected.abs(), min=ATOL)
    return {"finite": bool(out.isfinite().all()), "budget": float(error.max()), **asdict(launch)}


def prove(scale: float) -> dict[str, object]:
    """The first-use proof of a kernel whose last weights are ``scale`` times the right ones."""
    honest = packing.pack

    def spoiled(state: Mapping[str, torch.Tensor], sizes: FusedSizes) -> FusedWeights:
        weights = honest(state, sizes)
        return replace(weights, ffn_out=weights.ffn_out * scale)

    claim = Claim(_TILES, _model(1, 64, 32, 2, 32), True, True, 0, "cpu", (0, 0))
    packing.pack = spoiled
    refusal = prove_here(claim, device="cpu")
    packing.pack = honest
    return {"refusal": refusal}


def rowwise_errors() -> dict[str, object]:
    """Largest error of each row-wise kernel, on widths that are no powers of two."""
    torch.manual_seed(3)
    x, shift = 3 * torch.randn(7, 200) + 5, torch.randn(200)
    weight, bias = torch.randn(200), torch.randn(200)
    normal = torch.nn.functional.layer_norm(x + shift, (200,))
    copy = torch.full_like(x, float("nan"))
    rowwise.normalise(x, shift, copy)
    return {
        "copied": torch.equal(copy, x),
        "normalise": float((rowwise.normalise(x, shift) - normal).abs().max()),
        "finish": float(
            (rowwise.finish(x, shift, weight, bias) - (normal * weight + bias)).abs().max()
        ),
    }


#: Wide models, reduced: even tiles and odd ones, one tile of queries and two, all keys and some.
WIDE = (
    TransformerConfig(8, 32, 128, 2, 96, 2, False),
    TransformerConfig(4, 24, 192, 3, 104, 2),
    TransformerConfig(2, 77, 64, 1, 96, 2),
)


def prove_products(config: TransformerConfig, scale: float) -> dict[str, object]:
    """The first-use proof of the products, GELU's input being ``scale`` times the right one."""
    tile, right = products._NARROW, products.activated
    products._NARROW = products.Tile(32, 32, 128, 4, 2)

    def spoiled(a: torch.Tensor, *rest: object) -> torch.Tensor:
        return right(a * scale, *rest)  # type: ignore[arg-type]

    products.activated = spoiled
    refusal = products_proof.prove_here(
        products_proof.Claim(config, True, 0, "cpu", (8, 0)), device="cpu"
    )
    products.activated, products._NARROW = right, tile
    return {"refusal": refusal}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, check in CHECKS.items():
        print(json.dumps({"name": name, **run(check)}), file=sys.stdout, flush=True)
    print(json.dumps({"name": "proof", **prove(1.0)}))
    print(json.dumps({"name": "proof of a wrong kernel", **prove(1.02)}))
    print(json.dumps({"name": "rowwise", **rowwise_errors()}))
    # Once is enough here: the interpreter neither races nor varies.
    products_proof._SEEDS, products_proof._REPEATS = (1,), 1
    for config in WIDE:
        print(json.dumps({"name": f"products {config.seq_len}", **prove_products(config, 1.0)}))
    print(json.dumps({"name": "wrong products", **prove_products(WIDE[0], 1.05)}))

"""Weights that float16 would spoil: mended where that is exact, refused where it is not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from scaled_models import ACCEPTED, CONFIG, REFUSED, scaled

from fastlayer import CASES, FastTransformer, ReferenceTransformer, TransformerConfig
from fastlayer.contract import GIB, Precision, RuntimeContract
from fastlayer.device import Device
from fastlayer.kernels import half_range
from fastlayer.kernels.half_range import Affine, Block
from fastlayer.kernels.knobs import Launch, sizes_for
from fastlayer.kernels.packing import pack
from fastlayer.routes.folding import fold
from fastlayer.routes.prefix_stream import PrefixStream

_SCRIPT = Path(__file__).with_name("interpreted_scales.py")


def folded_exactly(state: Mapping[str, torch.Tensor], prefix: str) -> Block:
    """The block of a model's float64 state whose norms are folded and that is not mended."""

    def affine(name: str) -> Affine:
        return Affine(state[f"{prefix}{name}.weight"], state[f"{prefix}{name}.bias"])

    def after(norm: str, name: str) -> Affine:
        (gamma, beta), (weight, bias) = affine(norm), affine(name)
        return Affine(weight * gamma, bias + weight @ beta)

    return Block(
        *(after("norm1", f"attention.{name}_proj") for name in "qkv"),
        affine("attention.out_proj"),
        after("norm2", "ffn_in"),
        affine("ffn_out"),
    )


def block_of(model: ReferenceTransformer) -> Block:
    state = {name: value.detach().double() for name, value in model.state_dict().items()}
    return folded_exactly(state, "layers.0.")


def attend(block: Block, n: torch.Tensor) -> torch.Tensor:
    """One head over normalised rows, in float64."""
    q, k, v = (n @ each.weight.T + each.bias for each in (block.q, block.k, block.v))
    context = torch.softmax(q @ k.T, dim=1) @ v
    return context @ block.out.weight.T + block.out.bias


@pytest.mark.parametrize("case", [1, 7, 8, 9])
@pytest.mark.parametrize("spread", [0.0, 0.1, 0.5])
def test_ordinary_models_keep_their_numbers_bit_for_bit(case: int, spread: float) -> None:
    """``spread`` disturbs biases and norms as training might."""
    config = CASES[case]
    torch.manual_seed(case)
    model = ReferenceTransformer(
        TransformerConfig(1, 8, config.d_model, config.num_heads, config.ffn_dim, 1)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(spread * torch.randn_like(parameter))
    block = block_of(model)
    mended = block.mended()
    assert block.fits()
    for name in Block.__slots__:
        for ours, theirs in zip(getattr(mended, name), getattr(block, name), strict=True):
            assert torch.equal(ours, theirs), name

    layer = fold(FastTransformer.from_reference(model)._runtime.state.layers, torch.float16)[0]
    assert layer.fits
    qkv = torch.cat([block.q.weight, block.k.weight, block.v.weight]).half()
    assert torch.equal(layer.qkv, qkv)
    for folded, exact in (
        (layer.out, block.out.weight),
        (layer.ffn_in, block.ffn_in.weight),
        (layer.ffn_in_bias, block.ffn_in.bias),
        (layer.ffn_out, block.ffn_out.weight),
    ):
        assert torch.equal(folded, exact.half())
    biases = torch.cat([block.q.bias, block.k.bias, block.v.bias])
    assert torch.equal(layer.qkv_bias, biases.half())


def test_ordinary_models_are_packed_bit_for_bit() -> None:
    torch.manual_seed(3)
    config = TransformerConfig(1, 8, 64, 2, 96, 1)
    model = ReferenceTransformer(config)
    block, sizes = block_of(model), sizes_for(Launch("single"), config)
    packed = pack(model.state_dict(), sizes)
    qkv = torch.cat([block.q.weight, block.k.weight, block.v.weight]).T.half()
    assert torch.equal(packed.qkv[0], qkv)
    assert torch.equal(packed.out[0], block.out.weight.T.half())
    biases = [block.q.bias, block.k.bias, block.v.bias, block.out.bias]
    assert torch.equal(packed.biases[0, : 4 * 64], torch.cat(biases).float())
    assert not packed.overflow


@pytest.mark.parametrize("name", [*ACCEPTED, *REFUSED])
def test_mending_leaves_the_function_as_it_is(name: str) -> None:
    block = block_of(scaled(name))
    n = torch.nn.functional.layer_norm(torch.randn(40, 64, dtype=torch.float64), (64,))
    before, after = attend(block, n), attend(block.mended(), n)
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9 * float(before.abs().max()))


@pytest.mark.parametrize("name", ACCEPTED)
def test_scaled_models_fit_once_mended(name: str) -> None:
    block = block_of(scaled(name)).mended()
    assert block.fits()
    rows = torch.nn.functional.layer_norm(torch.randn(500, 64, dtype=torch.float64), (64,))
    # The worst a row can be: along the weights of one element.
    for each in (block.q, block.k, block.v, block.ffn_in):
        worst = torch.nn.functional.layer_norm(each.weight, (64,))
        elements = torch.cat([rows, worst]) @ each.weight.T + each.bias
        assert (elements.abs() <= each.largest).all()
        assert elements.abs().max() <= half_range.LARGEST


@pytest.mark.parametrize("name", ["k", "v"])
def test_a_bias_that_dwarfs_what_it_is_added_to_is_not_rounded_with_it(name: str) -> None:
    assert not getattr(block_of(scaled(f"{name}'s bias plus 10")).mended(), name).bias.any()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_mended_does_not_fit(name: str) -> None:
    model = scaled(name)
    assert not block_of(model).mended().fits()
    assert pack(model.state_dict(), sizes_for(Launch("single"), CONFIG)).overflow
    layers = FastTransformer.from_reference(model)._runtime.state.layers
    assert not fold(layers, torch.float16)[0].fits
    assert fold(layers, torch.float32)[0].fits, "float32 holds it"


def test_what_is_zero_or_nearly_so_fits() -> None:
    """Output layers that training starts at zero, and channels that were pruned."""
    model = scaled("as it is")
    layer = model.layers[0]
    with torch.no_grad():
        layer.attention.out_proj.weight.zero_()
        layer.ffn_out.weight.mul_(1e-8)
        layer.ffn_in.weight[3] = 0.0
        layer.attention.v_proj.weight[5] = 0.0
        layer.attention.q_proj.weight[7] = 0.0
    block = block_of(model).mended()
    assert block.fits()
    assert all(each.isfinite().all() for name in Block.__slots__ for each in getattr(block, name))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_what_is_not_finite_never_fits(value: float) -> None:
    for name in ("attention.q_proj", "attention.v_proj", "attention.out_proj", "ffn_in", "ffn_out"):
        model = scaled("as it is")
        with torch.no_grad():
            model.get_submodule(f"layers.0.{name}").weight[1, 2] = value
        assert not block_of(model).mended().fits(), name


def budget(candidate: torch.Tensor, expected: torch.Tensor) -> float:
    assert candidate.isfinite().all()
    return float(((candidate - expected).abs() / (0.02 * expected.abs()).clamp_min(0.002)).max())


@pytest.mark.parametrize("name", [*ACCEPTED, *REFUSED])
def test_prefix_stream_is_the_model_or_says_that_it_ran_in_float32(name: str) -> None:
    model = scaled(name)
    state = FastTransformer.from_reference(model)._runtime.state
    cpu, high = Device("cpu", "Some CPU", 16 * GIB), Precision("high", True)
    call = RuntimeContract(CONFIG, cpu, precision=high)
    bound = PrefixStream(state, call, {"attention": "exact", "compute": "float16"})
    x = torch.randn(CONFIG.batch_size, CONFIG.seq_len, CONFIG.d_model)
    with torch.no_grad():
        used = budget(bound(x, None), model(x))
    assert used <= (1.0 if name in ACCEPTED else 0.01), used
    noted = ["float32 ran instead" in note for note in state.notes]
    assert noted == ([] if name in ACCEPTED else [True])


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, object]]:
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, str(_SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize("form", ["single", "wavefront", "strips"])
def test_the_fused_kernels_compute_scaled_models(
    form: str, interpreted: dict[str, dict[str, object]]
) -> None:
    rows = [row for name, row in interpreted.items() if name.startswith(form)]
    assert len(rows) == 6
    for row in rows:
        assert row["finite"], row
        assert float(str(row["budget"])) <= 0.6, row

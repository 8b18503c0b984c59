"""The fused kernels on a GPU, through ``FastTransformer``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fastlayer import CASES, FastTransformer, ReferenceTransformer, TransformerConfig, make_inputs
from fastlayer.routes import launches

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SERVED = [case for case, config in CASES.items() if config.d_model <= 128]

ODD = {
    "one token": TransformerConfig(1, 1, 32, 2, 32, 1),
    "17 tokens, d=96, three heads": TransformerConfig(3, 17, 96, 3, 192, 2),
    "37 tokens, full": TransformerConfig(300, 37, 48, 6, 32, 2, False),
    "333 tokens": TransformerConfig(2, 333, 64, 4, 64, 2),
    "333 tokens, full, heads of 8": TransformerConfig(2, 333, 64, 8, 64, 2, False),
    "1024 tokens, one head": TransformerConfig(1, 1024, 128, 1, 128, 2),
    "70,000 samples": TransformerConfig(70_000, 5, 16, 1, 16, 1),
    "a wide hidden layer": TransformerConfig(2, 128, 128, 4, 512, 2),
}


@pytest.fixture(autouse=True)
def _high_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    with torch.no_grad():
        yield
    torch.set_float32_matmul_precision(before)


def pair(
    config: TransformerConfig, launch: dict[str, object] | None = None
) -> tuple[ReferenceTransformer, FastTransformer]:
    torch.manual_seed(1234)
    reference = ReferenceTransformer(config).eval().cuda()
    return reference, FastTransformer.from_reference(reference, route="fused", launch=launch)


def assert_accepted(candidate: torch.Tensor, reference: torch.Tensor) -> None:
    assert torch.isfinite(candidate).all()
    budget = (candidate - reference).abs() / (0.02 * reference.abs()).clamp_min(0.002)
    assert budget.max() <= 1.0, f"the worst element uses {budget.max():.2f} of its tolerance"


def poison(*shape: int) -> None:
    """Leaves NaN where the allocator will put the next output."""
    torch.full(shape, float("nan"), device="cuda")


@pytest.mark.parametrize("padding", [0.0, 0.5])
@pytest.mark.parametrize("case", SERVED)
def test_every_listed_launch_of_every_case(case: int, padding: float) -> None:
    config = replace(CASES[case], batch_size=min(CASES[case].batch_size, 512))
    x, mask = make_inputs(config, 1234, "cuda", padding)
    reference, model = pair(config)
    expected = reference(x, mask)
    model(x, mask)
    assert model.last_decision is not None
    for launch in launches("fused", model.last_decision.contract):
        _, model = pair(config, dict(launch))
        for _ in range(3):
            poison(*x.shape)
            assert_accepted(model(x, mask), expected)
        assert model.last_decision is not None
        assert model.last_decision.notes == ()


@pytest.mark.parametrize("padding", [0.0, 0.6])
@pytest.mark.parametrize("name", ODD)
def test_odd_shapes(name: str, padding: float) -> None:
    config = ODD[name]
    x, mask = make_inputs(config, 1234, "cuda", padding)
    reference, model = pair(config)
    for _ in range(2):
        poison(*x.shape)
        assert_accepted(model(x, mask), reference(x, mask))


def test_an_empty_sample_gives_zeros() -> None:
    config = replace(CASES[1], batch_size=4)
    x, _ = make_inputs(config, 1234, "cuda")
    mask = torch.ones(4, 128, dtype=torch.bool, device="cuda")
    mask[1] = False
    mask[2, 50:] = False
    reference, model = pair(config)
    out = model(x * mask[:, :, None], mask)
    assert_accepted(out, reference(x * mask[:, :, None], mask))
    assert not out[1].any()
    assert not out[2, 50:].any()


def test_edits_views_streams_and_held_outputs() -> None:
    config = replace(CASES[3], batch_size=6)
    x, _ = make_inputs(config, 1234, "cuda")
    reference, model = pair(config)
    held = model(x)
    kept = held.clone()
    model.layers[1].ffn_in.weight.mul_(1.5)
    assert_accepted(model(x), reference(x))
    assert torch.equal(held, kept)
    strided = torch.cat([x, x], dim=2)[:, :, :128]
    shifted = torch.empty(x.numel() + 1, device="cuda")[1:].view_as(x).copy_(x)
    for view in (strided, shifted):
        assert_accepted(model(view), reference(x))
    expected = reference(x)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outputs = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                outputs.append(model(x))
    torch.cuda.synchronize()
    for out in outputs:
        assert_accepted(out, expected)


def test_a_warm_call_costs_the_host_little() -> None:
    """The host's share of a call, while the device is kept busy by nothing else."""
    x, _ = make_inputs(CASES[2], 1234, "cuda")
    _, model = pair(CASES[2])
    for _ in range(200):
        model(x)
    torch.cuda.synchronize()
    costs = []
    for _ in range(300):
        start = time.perf_counter()
        model(x)
        costs.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    assert statistics.median(costs) < 100e-6

"""What only a GPU can show of long sequences. About two minutes on an H200, 12 GiB."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from extreme_support import budget
from torch.nn import functional as F

from fastlayer import CASES, FastTransformer, ReferenceTransformer, TransformerConfig, polynomial
from fastlayer.extreme import compare, make_model, make_runner
from fastlayer.inputs import make_inputs
from fastlayer.oracle import Oracle
from fastlayer.polynomial import Guard
from fastlayer.routes import long_attention
from fastlayer.routes.long_attention import NoFusedAttentionError
from fastlayer.streaming import stream

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.usefixtures("_high"),
]

WIDE = replace(CASES[14], batch_size=1)
EXACT = {"attention": "exact", "compute": "float16"}
FORCED = {"attention": "polynomial", "compute": "float16"}


@pytest.fixture
def _high() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    with torch.no_grad():
        yield
    torch.set_float32_matmul_precision(before)


def sample(tokens: int, batch: int = 1) -> tuple[TransformerConfig, torch.Tensor]:
    config = replace(WIDE, batch_size=batch, seq_len=tokens)
    return config, make_inputs(config, 1234, "cuda")[0]


def test_numbers_reach_the_host_whatever_the_copy_engine_does() -> None:
    from fastlayer.kernels.readback import read

    values = torch.arange(12.0, device="cuda").view(3, 4)[:, 1] * 0.5
    assert read(values) == [0.5, 2.5, 4.5]
    odd = torch.tensor([math.inf, -1.0, math.nan], device="cuda")
    first, second, third = read(odd)
    assert (first, second, math.isnan(third)) == (math.inf, -1.0, True)
    large = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    host = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    download = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(download):
        host.copy_(large, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
    read(odd)
    assert not copied.query(), "it waited for the download of a gigabyte"
    torch.cuda.synchronize()


def heads(tokens: int, count: int = 4, spread: float = 0.33) -> list[torch.Tensor]:
    """``q, k, v [H, N, 64]`` as views of one packed projection."""
    generator = torch.Generator("cuda").manual_seed(3)
    packed = torch.randn(tokens, 3, count, 64, generator=generator, device="cuda")
    packed[:, 0] *= spread
    return [packed.half()[:, i].transpose(0, 1) for i in range(3)]


def test_the_oracle_is_the_dense_reference_at_4096_tokens() -> None:
    config, x = sample(4096)
    model = make_model(config, "cuda")
    found = compare(Oracle(model, workspace_bytes=2**28)(x)[0], model(x)[0])
    assert (found["total"], found["failed"]) == (4_194_304, 0)
    assert found["budget_used"] <= 0.3


@pytest.mark.parametrize("tokens", [4096 + 1, 8192, 8192 + 77, 16_384 - 1])
@pytest.mark.parametrize(("kind", "group"), [("rows", None), ("rows", 3), ("hermite", 3)])
def test_the_kernel_does_what_the_algorithm_does(tokens: int, kind: str, group: int | None) -> None:
    """Outputs poisoned with NaN; twenty runs to the bit, for a race would differ."""
    from fastlayer.kernels.polynomial import polynomial_attention

    q, k, v = heads(tokens)
    found = polynomial.survey(q, k, v, first_row=4096).scores
    coefficients = polynomial.coefficients_of(kind, found)
    outs = []
    for _ in range(20):
        out = torch.full((tokens, 4, 64), math.nan, device="cuda").half().transpose(0, 1)
        polynomial_attention(
            q, k, v, out, coefficients, first_row=4096, chunk=1024, heads_at_once=group
        )
        outs.append(out)
    assert all(torch.equal(out[:, 4096:], outs[0][:, 4096:]) for out in outs)
    assert outs[0][:, :4096].isnan().all()
    twin = torch.zeros_like(q, dtype=torch.float32)
    polynomial.polynomial_attention(q, k, v, twin, coefficients, first_row=4096)
    difference = (outs[0][:, 4096:].float() - twin[:, 4096:]).abs()
    assert difference.max() <= 3e-4
    exact = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    assert (exact[:, 4096:].float() - twin[:, 4096:]).abs().max() <= 5e-3


def test_memory_beside_the_tensors_is_never_written() -> None:
    from fastlayer.kernels.polynomial import polynomial_attention

    tokens = 8192 + 77
    q, k, v = heads(tokens)
    room = torch.full((tokens + 200, 4, 64), 7.0, device="cuda").half()
    out = room[:tokens].transpose(0, 1)
    polynomial_attention(q, k, v, out, None, first_row=4096, chunk=1024)
    assert (room[tokens:] == 7.0).all()
    assert (room[:4096] == 7.0).all()


@pytest.mark.parametrize("tokens", [333, 4096, 10_001])
def test_exact_streaming_against_the_oracle(tokens: int) -> None:
    config, x = sample(tokens, batch=2)
    model = make_model(config, "cuda")
    result, tally = make_runner(model, x, EXACT)(x)
    assert tally.layers == {"polynomial": 0, "exact": 4}
    expected = Oracle(model)(x)
    for ours, theirs in zip(result, expected, strict=True):
        assert compare(ours, theirs)["budget_used"] <= 0.6


@pytest.mark.parametrize("backend", ["cudnn", "flash"])
def test_backends_by_name(backend: str) -> None:
    q, k, v = heads(3000)
    result = long_attention.exact_attention(q, k, v, backend)
    exact = polynomial.exact_rows(q, k, v, torch.arange(0, 3000, 37, device="cuda"))
    exact = exact.transpose(0, 1).reshape(-1, 256)
    torch.testing.assert_close(result[::37].float(), exact, rtol=0, atol=3e-3)


@pytest.mark.parametrize("backend", ["FA3", "FA4"])
def test_other_implementations_serve_or_say_why(backend: str) -> None:
    q, k, v = heads(3000)
    expected = long_attention.exact_attention(q, k, v)
    before = torch.nn.attention.current_flash_attention_impl()
    message = ""
    try:
        result = long_attention.exact_attention(q, k, v, backend)
    except NoFusedAttentionError as error:
        result, message = expected, str(error)
    torch.testing.assert_close(result, expected, rtol=0, atol=3e-3)
    assert not message or backend in message
    assert torch.nn.attention.current_flash_attention_impl() == before


def test_the_polynomial_at_16384_tokens() -> None:
    """Fewer tokens than the curve's, so a looser bound; the row check agrees with the oracle."""
    config, x = sample(16_384)
    model = make_model(config, "cuda")
    result, tally = make_runner(model, x, FORCED)(x)
    assert tally.layers == {"polynomial": 2, "exact": 0}
    assert 0.25 < tally.sigma < 0.45
    assert tally.row_budget <= 0.5
    found = compare(result[0], Oracle(model)(x)[0])
    assert found["failed"] == 0


def test_a_wide_spread_is_recomputed_exactly() -> None:
    config, x = sample(16_384)
    model = make_model(config, "cuda", factor=4.0)
    guarded = {"attention": "guarded", "compute": "float16"}
    result, tally = make_runner(model, x, guarded, Guard(1e9, "lax"))(x)
    assert tally.recomputed == 1
    exact, _ = make_runner(model, x, EXACT)(x)
    assert torch.equal(result, exact)
    _, tally = make_runner(model, x, guarded, Guard(0.45, "assumed"))(x)
    assert tally.layers["polynomial"] == 0


@pytest.mark.parametrize("launch", [EXACT, FORCED], ids=["exact", "polynomial"])
def test_the_workspace_of_100_000_tokens(launch: dict[str, object]) -> None:
    config, x = sample(100_000)
    run = make_runner(make_model(config, "cuda"), x, launch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result, _ = run(x)
    assert result.isfinite().all()
    above = torch.cuda.max_memory_allocated() - before - config.activation_bytes()
    assert above <= 4 * 2**30


def test_highest_precision_is_float32() -> None:
    torch.set_float32_matmul_precision("highest")
    config, x = sample(5000)
    model = make_model(config, "cuda")
    fast = FastTransformer.from_reference(model, route="prefix_stream")
    result = fast(x)
    assert fast.last_decision is not None
    assert fast.last_decision.launch == {"attention": "exact", "compute": "float32"}
    assert compare(result[0], Oracle(model)(x)[0])["budget_used"] <= 0.05


def test_masks_of_every_kind() -> None:
    config, x = sample(5000, batch=3)
    model = make_model(config, "cuda")
    launch = {"attention": "guarded", "compute": "float16"}
    fast = FastTransformer.from_reference(model, route="prefix_stream", launch=launch)
    lengths = torch.tensor([[5000], [4200], [0]], device="cuda")
    right = torch.arange(5000, device="cuda")[None] < lengths
    holed = torch.ones_like(right)
    holed[:, 1::3] = False
    for mask in (right, holed, right.flip(1)):
        poisoned = x.masked_fill(~mask[:, :, None], math.nan)
        assert budget(fast(poisoned, mask), Oracle(model)(x, mask)) <= 0.6


@pytest.mark.parametrize("pinned", [True, False])
def test_streaming_equals_resident_to_the_bit(pinned: bool) -> None:
    """Eight samples of changing lengths through three slots: none may see another's data."""
    config, _ = sample(6000)
    model: ReferenceTransformer = make_model(config, "cuda")
    sizes = [6000, 3000, 6000, 5999, 100, 6000, 1, 4500]
    generator = torch.Generator().manual_seed(8)
    host = [torch.randn(size, 1024, generator=generator) for size in sizes]
    source = [t.pin_memory() for t in host] if pinned else host
    results: list[torch.Tensor] = []
    report = stream(model, source, lambda index, out: results.append(out.clone()), launch=EXACT)
    assert report.tokens == sum(sizes)
    for x, result in zip(host, results, strict=True):
        alone, _ = make_runner(model, x[None].cuda(), EXACT)(x[None].cuda())
        assert not result.is_cuda
        assert compare(result, alone[0].cpu())["budget_used"] <= 0.05


def test_streaming_of_device_samples_and_errors_on_the_way() -> None:
    config, x = sample(5000, batch=4)
    model = make_model(config, "cuda")
    results: list[torch.Tensor] = []
    stream(model, x, lambda index, out: results.append(out.clone()), launch=EXACT)
    alone, _ = make_runner(model, x, EXACT)(x)
    assert all(result.is_cuda for result in results)
    assert budget(torch.stack(results), alone) <= 0.05

    def sink(index: int, out: torch.Tensor) -> None:
        if index == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stream(model, x.cpu(), sink, launch=EXACT)
    torch.cuda.synchronize()

"""Route ``half_gemm``: folding, masks and objections on the CPU; the rest needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from scaled_models import ACCEPTED, CONFIG, REFUSED, scaled
from torch.nn import functional as F

from fastlayer import CASES, FastTransformer, ReferenceTransformer, TransformerConfig, make_inputs
from fastlayer.contract import GIB, Precision, RuntimeContract
from fastlayer.device import Device
from fastlayer.errors import RouteRefused
from fastlayer.masks import MaskKind
from fastlayer.routes import Launch, eligible_routes, half_gemm
from fastlayer.routes.body import serve_mask
from fastlayer.routes.folding import fold

rowwise = pytest.importorskip("fastlayer.kernels.rowwise")
products = pytest.importorskip("fastlayer.kernels.products")
products_proof = pytest.importorskip("fastlayer.kernels.products_proof")

H200 = Device("cuda", "NVIDIA H200", 140 * GIB, (9, 0), 132, 232_448)
CALL = RuntimeContract(CASES[8], H200, precision=Precision("high", True))
ROUTE = half_gemm.HalfGemmRoute()
SMALL = TransformerConfig(3, 24, 192, 3, 96, 2)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def with_biases(config: TransformerConfig) -> ReferenceTransformer:
    torch.manual_seed(1234)
    model = ReferenceTransformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def assert_accepted(candidate: torch.Tensor, reference: torch.Tensor) -> None:
    assert torch.isfinite(candidate).all()
    budget = (candidate - reference).abs() / (0.02 * reference.abs()).clamp_min(0.002)
    assert budget.max() <= 1.0, f"the worst element uses {budget.max():.2f} of its tolerance"


@pytest.fixture
def _rows_in_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels by torch's operators: what is tested here is what lies between."""

    def normalise(
        x: torch.Tensor,
        shift: torch.Tensor,
        copy: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if copy is not None:
            copy.copy_(x)
        normal = F.layer_norm(x + shift, x.shape[-1:]).half()
        return normal if out is None else out.copy_(normal)

    def finish(
        x: torch.Tensor,
        shift: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        return out.copy_(F.layer_norm(x + shift, x.shape[-1:], weight, bias))

    def activated(
        a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tile: object
    ) -> torch.Tensor:
        return F.gelu(F.linear(a.float(), weight.float(), bias.float())).half()

    def attend(qkv: torch.Tensor, batch: int, heads: int, causal: bool) -> torch.Tensor:
        q, k, v = qkv.float().view(batch, -1, 3, heads, qkv.shape[1] // 3 // heads).unbind(2)
        context = F.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in (q, k, v)), is_causal=causal
        )
        return context.transpose(1, 2).reshape(qkv.shape[0], -1).half()

    monkeypatch.setattr(rowwise, "normalise", normalise)
    monkeypatch.setattr(rowwise, "finish", finish)
    monkeypatch.setattr(products, "activated", activated)
    monkeypatch.setattr(products, "attend", attend)
    monkeypatch.setattr(
        half_gemm, "_BACKENDS", [*half_gemm._BACKENDS, torch.nn.attention.SDPBackend.MATH]
    )
    with torch.no_grad():
        yield


@pytest.mark.usefixtures("_rows_in_torch")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", [MaskKind.NONE, MaskKind.RIGHT_PADDED, MaskKind.IRREGULAR])
@pytest.mark.parametrize(("parts", "own_attention"), [(1, False), (2, True)])
def test_the_folded_body_is_the_model(
    causal: bool, kind: MaskKind, parts: int, own_attention: bool
) -> None:
    config = replace(SMALL, causal=causal)
    reference = with_biases(config)
    model = FastTransformer.from_reference(reference)
    x = torch.randn(3, 24, 192)
    mask = None
    if kind is not MaskKind.NONE:
        mask = torch.arange(24)[None] < torch.tensor([24, 7, 1])[:, None]
        if kind is MaskKind.IRREGULAR:
            mask = mask.roll(3, dims=1)
        x = x * mask[:, :, None]
    kept = x.clone()
    body = half_gemm.HalfBody(
        fold(model._runtime.state.layers, torch.float16),
        model._runtime.state.final_norm,
        heads=config.num_heads,
        causal=causal,
        capability=(9, 0),
        shape=x.shape,
        parts=parts,
        own_attention=own_attention and (causal or kind is MaskKind.NONE),
    )
    result = serve_mask(body, kind)(x, mask)
    assert_accepted(result, reference(x, mask))
    assert torch.equal(x, kept), "the input was written"
    if kind is not MaskKind.IRREGULAR:
        # A graph keeps its state from call to call, whatever the last call left in it.
        state = body.enter(torch.full_like(x, float("nan")))
        body.inside(state, mask)
        assert body.enter(x, state) is state
        body.inside(state, mask)
        out = torch.full_like(x, float("nan"))
        assert body.leave(state, mask, out) is out
        assert torch.equal(out, result)


@pytest.mark.usefixtures("_rows_in_torch")
@pytest.mark.parametrize("name", ACCEPTED)
def test_scaled_weights_are_mended(name: str) -> None:
    reference = scaled(name)
    state = FastTransformer.from_reference(reference)._runtime.state
    layers = fold(state.layers, torch.float16)
    assert all(layer.fits for layer in layers)
    x = torch.randn(CONFIG.batch_size, CONFIG.seq_len, CONFIG.d_model)
    body = half_gemm.HalfBody(
        layers,
        state.final_norm,
        heads=CONFIG.num_heads,
        causal=True,
        capability=(9, 0),
        shape=x.shape,
    )
    assert_accepted(body(x, None), reference(x))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_mended_runs_float32_attention_and_notes_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_gemm, "bind_sdpa", lambda route, *_: route)
    state = FastTransformer.from_reference(scaled(name))._runtime.state
    assert ROUTE.bind(state, CALL, {}) == "sdpa"
    assert ["float32 attention ran" in note for note in state.notes] == [True]


def test_it_serves_the_wide_case() -> None:
    assert ROUTE.objections(CALL) == []
    assert ROUTE.launches(CALL)[0] == {"execution": "graph", "attention": "kernel", "parts": 2}
    small = replace(CALL, config=replace(CASES[8], batch_size=1))
    assert ROUTE.launches(small)[0] == {"execution": "graph", "attention": "kernel", "parts": 1}
    assert half_gemm.HalfGemmRoute.name in eligible_routes(CALL)


@pytest.mark.parametrize("changes", [{"seq_len": 129}, {"num_heads": 32}])
def test_long_sequences_and_narrow_heads_take_the_library_s_attention(
    changes: dict[str, int],
) -> None:
    call = replace(CALL, config=replace(CASES[8], **changes))
    assert {launch["attention"] for launch in ROUTE.launches(call)} == {"library"}
    model = FastTransformer(SMALL)
    with pytest.raises(ValueError, match="attention = 'kernel' is not one of"):
        ROUTE.bind(model._runtime.state, call, {"attention": "kernel"})


def test_what_failed_its_proof_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    claims: list[products_proof.Claim] = []

    def refused(claim: products_proof.Claim) -> str:
        claims.append(claim)
        return "its first-use proof: attend differs"

    monkeypatch.setattr(half_gemm, "_REFUSED", {})
    monkeypatch.setattr(products_proof, "refusal", refused)
    model = FastTransformer(SMALL)
    call = replace(CALL, config=replace(CASES[8], batch_size=5))
    with pytest.raises(RouteRefused, match="attend differs"):
        ROUTE.bind(model._runtime.state, call, {"attention": "kernel", "parts": 2})
    assert [(claim.config.batch_size, claim.attention) for claim in claims] == [(2, True)]
    assert ROUTE.objections(call) == ["its first-use proof: attend differs"]
    assert ROUTE.objections(CALL) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": Device("cpu", "Some CPU", 16 * GIB)}, "CUDA devices, not on cpu"),
        ({"precision": Precision("highest", False)}, "full precision"),
        ({"capturing": True}, "being captured"),
        ({"config": replace(CASES[8], ffn_dim=1001)}, "ffn_dim = 1001 is no multiple of 8"),
        ({"config": replace(CASES[8], num_heads=2)}, "head_dim = 512 exceeds 256"),
        ({"config": CASES[1]}, "d_model = 128 is narrow enough"),
        ({"available_bytes": 2**20}, "it needs"),
        ({"dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_it_objects_and_says_why(changes: dict[str, object], reason: str) -> None:
    assert reason in "; ".join(ROUTE.objections(replace(CALL, **changes)))  # type: ignore[arg-type]


def test_a_weight_beyond_float16_is_noticed() -> None:
    model = FastTransformer(SMALL)
    assert all(layer.fits for layer in fold(model._runtime.state.layers, torch.float16))
    with torch.no_grad():
        model.layers[1].norm1.weight[0] = 1e7
    model._runtime.state.refresh()
    assert not all(layer.fits for layer in fold(model._runtime.state.layers, torch.float16))


@needs_cuda
@pytest.mark.parametrize("padding", [0.0, 0.5])
@pytest.mark.parametrize(
    "launch",
    [
        {"execution": "eager"},
        {"execution": "eager", "parts": 2, "attention": "kernel"},
        {"execution": "graph", "parts": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("config", [replace(CASES[8], batch_size=8), SMALL], ids=["wide", "small"])
def test_on_a_gpu(config: TransformerConfig, launch: Launch, padding: float) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        reference = with_biases(config).cuda()
        model = FastTransformer.from_reference(reference)
        x, mask = make_inputs(config, 1234, "cuda", padding)
        kept = x.clone()
        with torch.no_grad():
            kind = model._runtime.classify(mask)
            call = model._contract(x, kind, compiling=False)
            assert ROUTE.objections(call) == []
            run = ROUTE.bind(model._runtime.state, call, launch)
            for _ in range(3):
                assert_accepted(run(x, mask if kind.masks else None), reference(x, mask))
        assert torch.equal(x, kept)
        assert model._runtime.state.notes == []
    finally:
        torch.set_float32_matmul_precision(before)

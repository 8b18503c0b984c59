"""The route for long sequences, at lengths a CPU can check against the dense reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from extreme_support import budget, inputs, masks, reference

from fastlayer import (
    CASES,
    Admissions,
    FastTransformer,
    MaskKind,
    RouteError,
    RuntimeContract,
    TransformerConfig,
    UnsafeFallbackError,
    decide,
)
from fastlayer.contract import GIB, Precision
from fastlayer.device import Device
from fastlayer.masks import classify
from fastlayer.polynomial import CHUNK, EXACT_ROWS, Guard
from fastlayer.routes import long_attention, prefix_body
from fastlayer.routes.base import Launch
from fastlayer.routes.long_attention import NoFusedAttentionError
from fastlayer.routes.prefix_stream import PrefixStream, PrefixStreamRoute

HIGH = Precision("high", True)
H200 = Device("cuda", "NVIDIA H200", 140 * GIB, (9, 0), 132, 232_448)
RTX5080 = Device("cuda", "NVIDIA GeForce RTX 5080", 16 * GIB, (12, 0), 84, 101_376)
CPU = Device("cpu", "Some CPU", 16 * GIB)

SMALL = TransformerConfig(3, 37, 32, 4, 48, 2, True)
LONG = TransformerConfig(2, 700, 32, 2, 32, 2, True)

HALF: Launch = {"attention": "exact", "compute": "float16"}
FLOAT: Launch = {"attention": "exact", "compute": "float32"}
POLYNOMIAL: Launch = {
    "attention": "guarded", "compute": "float16", "exact_rows": 256, "chunk": 64, "rows": 100,
}  # fmt: skip
CALIBRATED = Guard(0.45, "calibrated for this test")


def scored(factor: float) -> torch.nn.Module:
    """A model over ``LONG`` whose scores are ``factor`` times as wide: 0.33 at one.

    The fewer keys there are, the less their errors cancel: a few hundred keys need tamer scores
    than the hundred thousand that the polynomial is for.
    """
    model = reference(LONG, biases=False)
    for layer in model.layers:
        layer.attention.q_proj.weight.mul_(factor)
        layer.attention.q_proj.bias.mul_(factor)
    return model


def contract(config: TransformerConfig, device: Device = CPU, **changes: object) -> RuntimeContract:
    call = RuntimeContract(
        config, device, precision=HIGH, available_bytes=device.memory_bytes * 15 // 16
    )
    return replace(call, **changes)  # type: ignore[arg-type]


def bind(
    model: torch.nn.Module,
    config: TransformerConfig,
    launch: Launch,
    mask: torch.Tensor | None = None,
    guard: Guard | None = None,
    **changes: object,
) -> tuple[FastTransformer, PrefixStream]:
    fast = FastTransformer.from_reference(model, config=config)
    state = fast._own_runtime().state
    state.refresh()
    call = contract(config, mask=classify(mask), **changes)
    return fast, PrefixStream(state, call, launch, guard)


def run(
    model: torch.nn.Module,
    x: torch.Tensor,
    launch: Launch,
    mask: torch.Tensor | None = None,
    guard: Guard | None = None,
) -> tuple[torch.Tensor, str]:
    config = replace(TransformerConfig.of(model.config), batch_size=len(x), seq_len=x.shape[1])
    fast, bound = bind(model, config, launch, mask, guard)
    result = bound(x, mask)
    return result, " ".join(fast._own_runtime().state.measured)


@pytest.mark.parametrize("launch", [HALF, FLOAT], ids=["half", "float"])
@pytest.mark.parametrize("kind", masks(3, 37))
@pytest.mark.parametrize("rows", [None, 7])
def test_every_kind_of_mask(kind: str, launch: Launch, rows: int | None) -> None:
    model = reference(SMALL)
    x, mask = inputs(SMALL), masks(3, 37)[kind]
    expected = model(x, mask)
    if mask is not None:
        x = x.masked_fill(~mask[:, :, None], float("nan"))  # Padding may hold anything.
    result, _ = run(model, x, {**launch, **({"rows": rows} if rows else {})}, mask)
    assert budget(result, expected) <= (0.6 if launch is HALF else 0.01)
    if mask is not None:
        assert not result[~mask].any()


def test_half_precision_is_really_used_and_float_really_not() -> None:
    model = reference(SMALL)
    x = inputs(SMALL)
    expected = model(x)
    half, exact = (run(model, x, launch)[0] for launch in (HALF, FLOAT))
    assert (exact - expected).abs().max() < 1e-5
    assert 1e-5 < (half - expected).abs().max() < 2e-3


@pytest.mark.parametrize("tokens", [1, 17, 333])
def test_odd_lengths_and_widths(tokens: int) -> None:
    config = TransformerConfig(2, tokens, 96, 3, 40, 1, True)
    model = reference(config)
    x = inputs(config)
    assert budget(run(model, x, HALF)[0], model(x)) <= 0.6
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(run(model, strided, HALF)[0], run(model, x, HALF)[0])


def test_blocks_change_nothing_beyond_rounding() -> None:
    model = reference(LONG)
    x = inputs(LONG)
    whole, _ = run(model, x, FLOAT)
    blocks, _ = run(model, x, {**FLOAT, "rows": 64})
    torch.testing.assert_close(whole, blocks, rtol=0, atol=1e-5)


# The guard and the row check.


def test_an_uncalibrated_guard_is_exact_and_says_so() -> None:
    model = reference(LONG)
    x = inputs(LONG)
    result, notes = run(model, x, POLYNOMIAL, guard=Guard(None, "uncalibrated"))
    exact, _ = run(model, x, {**HALF, "rows": 100})
    assert torch.equal(result, exact)
    assert notes == (
        "attention: 0 layer runs polynomial, 4 exact; 4 because the guard is uncalibrated"
    )


def test_tame_scores_take_the_polynomial_and_pass() -> None:
    model = scored(0.25)
    x = inputs(LONG)
    result, notes = run(model, x, POLYNOMIAL, guard=CALIBRATED)
    assert "attention: 4 layer runs polynomial, 0 exact" in notes
    assert "worst score spread 0.0" in notes
    assert "threshold 0.45, calibrated for this test" in notes
    assert "row check: worst budget 0." in notes
    assert "0 samples recomputed" in notes
    assert budget(result, model(x)) <= 1.0
    assert not torch.equal(result, run(model, x, {**HALF, "rows": 100})[0])


def test_padding_and_short_samples_are_cut_before_the_polynomial() -> None:
    model = scored(0.25)
    x = inputs(LONG)
    mask = torch.arange(700)[None] < torch.tensor([[640], [200]])
    result, notes = run(model, x, POLYNOMIAL, mask, CALIBRATED)
    assert "2 layer runs polynomial, 2 exact; 2 because the first 256 rows are exact" in notes
    assert budget(result, model(x, mask)) <= 1.0


def test_a_wide_spread_is_refused_by_the_guard() -> None:
    model = scored(4.0)
    x = inputs(LONG)
    result, notes = run(model, x, POLYNOMIAL, guard=CALIBRATED)
    assert "attention: 0 layer runs polynomial, 4 exact" in notes
    assert "beyond 0.45" in notes
    assert budget(result, model(x)) <= 0.6


def test_a_failed_row_check_recomputes_the_sample_exactly() -> None:
    """A guard that lets everything pass leaves it to the second line of defence."""
    model = scored(4.0)
    x = inputs(LONG)
    lax = Guard(1e9, "lax")
    result, notes = run(model, x, POLYNOMIAL, guard=lax)
    assert "2 samples recomputed exactly" in notes
    assert "checked rows were beyond their budget" in notes
    assert torch.equal(result, run(model, x, {**HALF, "rows": 100})[0])
    forced, notes = run(model, x, {**POLYNOMIAL, "attention": "polynomial"}, guard=lax)
    assert "0 samples recomputed" in notes
    assert budget(forced, model(x)) > 1.0


def test_least_squares_beats_taylor_through_the_whole_model() -> None:
    model = scored(1.0)
    x = inputs(LONG)
    expected = model(x)
    errors = {
        kind: (
            run(model, x, {**POLYNOMIAL, "coefficients": kind, "attention": "polynomial"})[0]
            - expected
        )[:, 256:].square().mean()
        for kind in ("rows", "hermite", "taylor")
    }  # fmt: skip
    assert errors["rows"] < 0.8 * errors["hermite"] < 0.64 * errors["taylor"]


def test_irregular_masks_are_exact() -> None:
    model = scored(0.25)
    x = inputs(LONG)
    mask = torch.ones(2, 700, dtype=torch.bool)
    mask[0, ::3] = False
    result, notes = run(model, x, POLYNOMIAL, mask, CALIBRATED)
    assert "2 because the mask is irregular" in notes
    assert budget(result, model(x, mask)) <= 1.0


# Memory.


def test_out_of_memory_halves_the_blocks_and_starts_the_sample_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_body, "LEAST_ROWS", 16)
    finish = prefix_body._finish

    def small_memory(layer: object, h: torch.Tensor, context: torch.Tensor) -> None:
        finish(layer, h, context)  # type: ignore[arg-type]
        if len(h) > 50:
            raise torch.OutOfMemoryError("after the residual was written")

    monkeypatch.setattr(prefix_body, "_finish", small_memory)
    model = reference(LONG)
    x = inputs(LONG)
    fast, bound = bind(model, LONG, {**HALF, "rows": 100})
    assert budget(bound(x, None), model(x)) <= 0.6
    assert fast._own_runtime().state.notes == [
        "out of memory: blocks of 50 rows and half the states from now on"
    ]
    monkeypatch.setattr(prefix_body, "LEAST_ROWS", 60)
    with pytest.raises(torch.OutOfMemoryError):
        bind(model, LONG, {**HALF, "rows": 60})[1](x, None)


def test_the_block_follows_the_workspace() -> None:
    model = reference(LONG)
    _, roomy = bind(model, LONG, HALF)
    assert roomy.body._rows == 700
    tight = prefix_body.fixed_bytes(LONG, 2) + 300 * prefix_body.row_bytes(LONG, 2)
    _, bound = bind(model, LONG, HALF, working_set_bytes=tight)
    assert bound.body._rows == 300
    with pytest.raises(ValueError, match=r"'float32' and room for blocks of .* at least 256"):
        bind(model, LONG, FLOAT, working_set_bytes=tight - 45 * prefix_body.row_bytes(LONG, 2))


def test_case_14_takes_less_than_its_bounds() -> None:
    """Two GiB is the contract's default working set, four the most that streaming may take."""
    half = prefix_body.fixed_bytes(CASES[14], 2)
    assert half + 100_000 * prefix_body.row_bytes(CASES[14], 2) < 4 * GIB
    assert half < GIB
    assert prefix_body.fixed_bytes(CASES[14], 4) < 2 * GIB


# Dispatch.


@pytest.mark.parametrize("device", [H200, RTX5080, CPU], ids=lambda d: d.name)
def test_no_other_disclosed_case_is_its_business(device: Device) -> None:
    route = PrefixStreamRoute()
    for case, config in CASES.items():
        if case != 14:
            reasons = route.objections(contract(config, device))
            assert any("few enough for the other routes" in reason for reason in reasons)


def test_case_14_by_policy() -> None:
    call = contract(CASES[14], H200)
    with pytest.raises(UnsafeFallbackError, match=r"prefix_stream: not admitted for case 14"):
        decide(call, Admissions())
    decision = decide(call, Admissions(), "eligible")
    assert decision.route == "prefix_stream"
    assert decision.launch == {"attention": "guarded", "compute": "float16"}
    with pytest.raises(RouteError, match="dense"):
        decide(call, Admissions(), route="dense")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"config": replace(CASES[14], causal=False)}, "not causal"),
        ({"capturing": True}, "lengths are read on the host"),
        ({"device": replace(H200, capability=(7, 5))}, "needs capability 8.0"),
        ({"config": replace(CASES[14], num_heads=2)}, "head_dim up to 256"),
        ({"working_set_bytes": GIB // 2}, "working_set_bytes is 536,870,912"),
        ({"available_bytes": 13 * GIB}, "fastlayer.stream keeps neither"),
        ({"grad": True}, "inference-only"),
        ({"config": replace(CASES[14], seq_len=EXACT_ROWS)}, "few enough"),
    ],
)
def test_objections_are_reasons(changes: Mapping[str, object], reason: str) -> None:
    reasons = PrefixStreamRoute().objections(replace(contract(CASES[14], H200), **changes))
    assert any(reason in found for found in reasons), reasons
    assert not PrefixStreamRoute().objections(contract(CASES[14], H200))


def test_highest_precision_is_exact_float32() -> None:
    route = PrefixStreamRoute()
    call = contract(CASES[14], H200, precision=Precision("highest", False))
    assert not route.objections(call)
    assert route.launches(call) == [{"attention": "exact", "compute": "float32"}]
    model = reference(SMALL)
    with pytest.raises(ValueError, match=r"'float16' under .*'highest'; expected 'float32'"):
        bind(model, SMALL, HALF, precision=Precision("highest", False))
    for attention in ("polynomial", "guarded"):
        launch: Launch = {"attention": attention, "compute": "float32"}
        with pytest.raises(ValueError, match=rf"'{attention}' under .*'highest'; expected 'exact'"):
            bind(model, SMALL, launch, precision=Precision("highest", False))
    _, bound = bind(model, SMALL, {}, precision=Precision("highest", False))
    x = inputs(SMALL)
    torch.testing.assert_close(bound(x, None), model(x), rtol=0, atol=1e-5)


def test_launches_of_irregular_masks_are_exact() -> None:
    call = contract(CASES[14], H200, mask=MaskKind.IRREGULAR)
    assert PrefixStreamRoute().launches(call) == [{"attention": "exact", "compute": "float16"}]


@pytest.mark.parametrize(
    ("tokens", "order"), [(32_767, ["exact", "guarded"]), (32_768, ["guarded", "exact"])]
)
def test_the_polynomial_leads_where_it_pays(tokens: int, order: list[str]) -> None:
    call = contract(replace(CASES[14], seq_len=tokens), H200)
    assert [launch["attention"] for launch in PrefixStreamRoute().launches(call)] == order


def test_launch_errors_name_the_values() -> None:
    model = reference(SMALL)
    with pytest.raises(ValueError, match="no launch option 'warp'"):
        bind(model, SMALL, {"warp": 1})
    with pytest.raises(ValueError, match="expected a multiple of chunk = 64"):
        bind(model, SMALL, {"exact_rows": 100, "chunk": 64})


@pytest.mark.parametrize("option", ["rows", "chunk", "exact_rows"])
@pytest.mark.parametrize("value", [0, -5, 1.5, 1e30, float("nan"), "64", True])
def test_sizes_of_a_launch_are_sizes(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"given {option} = .*an integer of at least 1, or None"):
        bind(reference(SMALL), SMALL, {option: value})


def test_sizes_default_and_come_from_any_integer_type() -> None:
    _, bound = bind(reference(SMALL), SMALL, {"rows": None, "chunk": None, "exact_rows": None})
    assert (bound.body._rows, bound.body._plan.chunk) == (37, CHUNK)
    _, bound = bind(reference(SMALL), SMALL, {"rows": np.int64(7)})  # type: ignore[dict-item]
    assert bound.body._rows == 7


def test_the_model_runs_it_and_reports_the_last_call_only() -> None:
    config = TransformerConfig(1, EXACT_ROWS + 64, 16, 2, 16, 1, True)
    model = reference(config)
    fast = FastTransformer.from_reference(model, route="prefix_stream")
    x = inputs(config)
    for _ in range(2):
        result = fast(x)
        assert fast.last_decision is not None
        (note,) = fast.last_decision.notes
        assert note.startswith("attention: 0 layer runs polynomial, 1 exact")
    assert note in fast.last_decision.explain()
    # float32 on a CPU by default, and without the reference's N x N scores.
    from fastlayer.oracle import Oracle

    torch.testing.assert_close(result, Oracle(model)(x), rtol=0, atol=1e-5)


# Attention backends.


def test_fused_attention_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, 40, 16).half()
    assert long_attention.exact_attention(q, q, q).shape == (40, 32)
    for name in ("FA3", "FA4"):
        with pytest.raises(NoFusedAttentionError, match=rf"backend '{name}' is not available"):
            long_attention.exact_attention(q, q, q, name)

    def none(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(long_attention.F, "scaled_dot_product_attention", none)
    with pytest.raises(NoFusedAttentionError, match=r"No available kernel.*6,400 bytes of scores"):
        long_attention.exact_attention(q, q, q)


def test_the_quadratic_backend_is_never_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = [*long_attention._BACKENDS.values(), long_attention._FLOAT32, long_attention._CPU]
    for backends in allowed:
        assert torch.nn.attention.SDPBackend.MATH not in backends


@pytest.mark.parametrize("rows", [7, 64, 256, 300, 699, 700, 1000])
def test_columns_are_the_rows_whatever_the_blocks(rows: int) -> None:
    """q and k with tokens contiguous, zero up to a whole chunk, differ in k's bias alone."""
    model = reference(LONG)
    launch = {**FLOAT, "rows": rows, "chunk": 256, "exact_rows": 256}
    _, bound = bind(model, LONG, launch)
    body, layer, h = bound.body, bound.body._layers[0], inputs(LONG)[0].contiguous()
    assert [h[rows].shape[0] for rows in body._blocks(h)] == [
        s.stop - s.start for s in body._blocks(h)
    ]
    by_row = body._project(layer, h, by_column=False)
    by_column = body._project(layer, h, by_column=True)
    bias = layer.qkv_bias[32:64].view(2, 1, 16)
    for ours, theirs, missing in zip(by_column, by_row, (0.0, bias, 0.0), strict=True):
        torch.testing.assert_close(ours + missing, theirs, rtol=0, atol=1e-5)
    for t in by_column[:2]:
        assert t.stride() == (16 * 768, 1, 768)
        beyond = t.as_strided((2, 16, 768), (16 * 768, 768, 1), t.storage_offset())[:, :, 700:]
        assert not beyond.any()

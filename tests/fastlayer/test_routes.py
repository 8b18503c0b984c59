"""Every route, in every launch, against the reference: masks, odd shapes, dtypes, precisions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer_support import assert_accepted, make_pair, make_reference, masks, small

from fastlayer import CASES, FastTransformer, RouteError, make_inputs
from fastlayer.routes import launches
from fastlayer.routes.slices import Slices

LAUNCHES = {
    "packed mkldnn": {"packed_qkv": True, "linear": "mkldnn", "execution": "eager"},
    "mkldnn": {"packed_qkv": False, "linear": "mkldnn", "execution": "eager"},
    "packed aten": {"packed_qkv": True, "linear": "aten", "execution": "eager"},
    "aten": {"packed_qkv": False, "linear": "aten", "execution": "eager"},
    "slices of 2": {"packed_qkv": True, "linear": "mkldnn", "execution": "eager", "slice": 2},
}

SHAPES = {
    "one token": small(seq_len=1),
    "seventeen tokens": small(seq_len=17),
    "odd length": small(seq_len=37),
    "long": small(batch_size=2, seq_len=333),
    "three heads": small(d_model=96, num_heads=3),
    "one head": small(num_heads=1),
    "narrow ffn": small(ffn_dim=8),
    "wide ffn": small(ffn_dim=160),
    "one layer": small(num_layers=1),
    "head_dim 1": small(d_model=8, num_heads=8),
    "one sample": small(batch_size=1),
}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def check(config, launch, mask, route="sdpa", **options):
    reference, model = make_pair(config, route=route, launch=launch, **options)
    x, _ = make_inputs(config, 1234)
    expected = reference(x, mask)
    got = model(x, mask)
    assert_accepted(got, expected)
    if mask is not None:
        assert not got[~mask].any()
    assert model.last_decision.route == route
    assert model.last_decision.notes == ()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("kind", list(masks(3, 24)))
@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES.keys())
def test_masks(launch, kind, causal):
    check(small(causal=causal), launch, masks(3, 24)[kind])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_odd_shapes(shape, causal):
    config = replace(shape, causal=causal)
    kinds = masks(config.batch_size, config.seq_len)
    for kind in ("none", "right_padded", "holed_and_empty"):
        check(config, None, kinds[kind])


@pytest.mark.parametrize("case", [case for case in CASES if case not in (8, 14)])
@pytest.mark.parametrize("padding", [0.0, 0.9])
def test_disclosed_cases_at_a_small_batch(case, padding):
    config = replace(CASES[case], batch_size=2)
    reference, model = make_pair(config)
    x, mask = make_inputs(config, 1234 + case, padding_ratio=padding)
    assert_accepted(model(x, mask), reference(x, mask))
    assert model.last_decision.grounds == "eligible"


@pytest.mark.parametrize("kind", list(masks(7, 24)))
@pytest.mark.parametrize("samples", [1, 2, 3, 7])
def test_batch_stream_at_every_slice(samples, kind):
    config = small(batch_size=7)
    launch = {**LAUNCHES["packed mkldnn"], "slice": samples}
    check(
        config,
        launch,
        masks(7, 24)[kind],
        route="batch_stream",
        working_set_bytes=config.linear_bytes() - 1,
    )


def test_batch_stream_takes_its_slices_from_the_working_set():
    config = small(batch_size=7)
    one = replace(config, batch_size=1)
    sample = one.linear_bytes() + one.activation_bytes()
    _, model = make_pair(config, working_set_bytes=3 * sample)
    model(make_inputs(config, 1)[0])
    assert model.last_decision.route == "batch_stream"
    assert model.last_decision.launch["slice"] == 3


def test_batch_stream_objects_to_what_fits():
    config = small()
    _, model = make_pair(config, route="batch_stream")
    with pytest.raises(RouteError, match="within the working set"):
        model(make_inputs(config, 1)[0])


def test_slices_are_halved_when_memory_runs_out():
    config = small(batch_size=7)
    reference, model = make_pair(config)
    notes = model._runtime.state.notes
    sizes = []

    def body(x, mask):
        if len(x) > 2:
            raise torch.OutOfMemoryError("out of memory")
        sizes.append(len(x))
        return reference(x, mask)

    x, _ = make_inputs(config, 1)
    mask = masks(7, 24)["right_padded"]
    assert_accepted(Slices(body, body, 6, model._runtime.state)(x, mask), reference(x, mask))
    assert sizes == [1] * 7
    assert [note.split(";")[0] for note in notes] == [
        "a slice of 6 samples ran out of memory",
        "a slice of 3 samples ran out of memory",
    ]


def test_one_sample_that_does_not_fit_is_the_callers_error():
    def body(x, mask):
        raise torch.OutOfMemoryError("out of memory")

    _, model = make_pair(small())
    with pytest.raises(torch.OutOfMemoryError):
        Slices(body, body, 2, model._runtime.state)(torch.zeros(3, 4, 32), None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_take_the_reference_arithmetic(dtype):
    config = small()
    reference = make_reference(config, dtype=dtype)
    model = FastTransformer.from_reference(reference, policy="eligible")
    x, mask = make_inputs(config, 1, padding_ratio=0.5, dtype=dtype)
    assert torch.equal(model(x, mask), reference(x, mask))
    assert model.last_decision.route == "dense"
    with pytest.raises(RouteError, match=str(dtype).removeprefix("torch.")):
        FastTransformer.from_reference(reference, route="sdpa")(x, mask)


def test_inputs_need_not_be_contiguous():
    config = small()
    reference, model = make_pair(config)
    x = make_inputs(config, 1)[0].transpose(0, 1).contiguous().transpose(0, 1)
    assert not x.is_contiguous()
    assert_accepted(model(x), reference(x))
    assert_accepted(model(x, masks(3, 24)["holed"]), reference(x, masks(3, 24)["holed"]))


@pytest.mark.parametrize("scale", [1 / 3, 3.0])
def test_other_input_scales(scale):
    config = small(seq_len=64)
    reference, model = make_pair(config)
    x, mask = make_inputs(config, 9, padding_ratio=0.5, input_scale=scale)
    assert_accepted(model(x, mask), reference(x, mask))


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_matmul_precisions(precision):
    config = small(d_model=64)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        reference, model = make_pair(config)
        x, _ = make_inputs(config, 1)
        expected, got = reference(x), model(x)
        assert model.last_decision.contract.precision.float32_matmul_precision == precision
    finally:
        torch.set_float32_matmul_precision(before)
    if precision != "medium":  # "medium" permits bfloat16 products, in either arm
        assert_accepted(got, expected)


def test_inputs_are_not_written():
    config = small()
    _, model = make_pair(config)
    x, _ = make_inputs(config, 1)
    mask = masks(3, 24)["holed"]
    before = x.clone(), mask.clone()
    model(x, mask)
    assert torch.equal(x, before[0])
    assert torch.equal(mask, before[1])


def test_two_outputs_are_two_tensors():
    config = small()
    _, model = make_pair(config)
    first_input, second_input = make_inputs(config, 1)[0], make_inputs(config, 2)[0]
    first = model(first_input)
    kept = first.clone()
    second = model(second_input)
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)


def test_attention_refuses_the_quadratic_path(monkeypatch):
    from torch.nn.attention import SDPBackend

    from fastlayer.routes import body

    config = small()
    _, model = make_pair(config, route="sdpa")
    seen = []
    original = body.sdpa_kernel
    monkeypatch.setattr(
        body, "sdpa_kernel", lambda backends: seen.extend(backends) or original(backends)
    )
    model(make_inputs(config, 1)[0])
    assert seen
    assert SDPBackend.MATH not in seen


def test_a_launch_with_an_unknown_option_is_refused():
    config = small()
    x, _ = make_inputs(config, 1)
    for launch, message in [
        ({"tiles": 4}, "no launch option 'tiles'"),
        ({"linear": "cublas"}, "linear = 'cublas' is not one of"),
    ]:
        _, model = make_pair(config, route="sdpa", launch=launch)
        with pytest.raises(ValueError, match=message):
            model(x)


def test_a_compilation_that_fails_runs_eagerly_and_says_so(monkeypatch):
    from torch._dynamo.exc import TorchDynamoException

    class NoCompilerError(TorchDynamoException):
        pass

    def fail(*args, **kwargs):
        def run(x, mask):
            raise NoCompilerError("no C++ compiler was found")

        return run

    monkeypatch.setattr(torch, "compile", fail)
    config = small()
    reference, model = make_pair(
        config,
        route="sdpa",
        launch={"packed_qkv": True, "linear": "aten", "execution": "compiled"},
    )
    x, _ = make_inputs(config, 1)
    for _ in range(2):
        assert_accepted(model(x), reference(x))
        assert any("no C++ compiler" in note for note in model.last_decision.notes)
    assert "note:     compilation failed" in model.last_decision.explain()


def test_every_launch_worth_measuring_binds():
    config = small(batch_size=2, num_layers=1)
    reference, probe = make_pair(config, route="sdpa")
    x, _ = make_inputs(config, 1)
    probe(x)
    for launch in launches("sdpa", probe.last_decision.contract):
        if launch["execution"] == "eager":
            model = FastTransformer.from_reference(reference, route="sdpa", launch=launch)
            assert_accepted(model(x), reference(x))

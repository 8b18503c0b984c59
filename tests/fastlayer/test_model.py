"""FastTransformer as a module: construction, exchange of weights, errors, explanations."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from layer_support import assert_accepted, make_pair, make_reference, masks, small
from torch import nn

from fastlayer import (
    CASES,
    Admission,
    Admissions,
    ConfigError,
    FastTransformer,
    InputError,
    ReferenceTransformer,
    RouteError,
    UnsafeFallbackError,
    alterations,
    make_inputs,
)
from fastlayer import model as model_module
from fastlayer.contract import Precision
from fastlayer.device import free_bytes, probe
from fastlayer.reference import ReferenceBlock

CONFIG = small()


def test_names_shapes_and_initialisation_are_the_references():
    torch.manual_seed(1234)
    fast = FastTransformer(CONFIG)
    reference = make_reference(CONFIG)
    theirs = dict(reference.named_parameters())
    assert [name for name, _ in fast.named_parameters()] == list(theirs)
    for name, parameter in fast.named_parameters():
        assert torch.equal(parameter, theirs[name])


def test_strict_state_dict_exchange_both_ways():
    reference, fast = make_reference(CONFIG), FastTransformer(CONFIG).eval()
    fast.load_state_dict(reference.state_dict(), strict=True)
    x, _ = make_inputs(CONFIG, 1)
    assert torch.equal(fast(x), reference(x))
    other = FastTransformer(CONFIG)
    reference.load_state_dict(other.state_dict(), strict=True)
    assert torch.equal(other(x), reference(x))


def test_from_reference_shares_the_very_parameters():
    reference, fast = make_pair(CONFIG)
    ours = dict(fast.named_parameters())
    for name, parameter in reference.named_parameters():
        assert ours[name] is parameter
    assert fast.training == reference.training
    x, _ = make_inputs(CONFIG, 1)
    with torch.no_grad():
        fast(x)
        reference.final_norm.bias.add_(2.0)
        assert_accepted(fast(x), reference(x))


def test_from_reference_leaves_the_random_generator_alone():
    reference = make_reference(CONFIG)
    before = torch.get_rng_state()
    FastTransformer.from_reference(reference)
    assert torch.equal(torch.get_rng_state(), before)


class Doubled(ReferenceTransformer):
    def forward(self, x, valid_token_mask=None):
        return super().forward(x, valid_token_mask) * 2


class Renamed(ReferenceTransformer):
    """A subclass that computes what its parent does."""


class OtherBlock(ReferenceBlock):
    def forward(self, x, valid_token_mask=None):
        return super().forward(x, valid_token_mask) * 2


ALTERATIONS = {
    "class Doubled has a forward": lambda m: setattr(m, "__class__", Doubled),
    "model carries a forward": lambda m: setattr(m, "forward", lambda x, mask=None: x),
    "model carries a _call_impl": lambda m: setattr(m, "_call_impl", lambda x, mask=None: x),
    "model carries a hook": lambda m: m.register_forward_hook(lambda *_: None),
    "layers.0 is OtherBlock": lambda m: setattr(m.layers[0], "__class__", OtherBlock),
    "layers.0.ffn_in carries a hook": lambda m: m.layers[0].ffn_in.register_forward_pre_hook(
        lambda *_: None
    ),
    "attention carries a forward": lambda m: setattr(m.layers[1].attention, "forward", abs),
    "attention has causal = False": lambda m: setattr(m.layers[1].attention, "causal", False),
    "final_norm has eps": lambda m: setattr(m.final_norm, "eps", 0.1),
    "layers.2 is not part": lambda m: m.layers.append(torch.nn.GELU()),
}


@pytest.mark.parametrize("reason", ALTERATIONS)
def test_from_reference_refuses_what_it_would_compute_otherwise(reason):
    reference = make_reference(CONFIG)
    ALTERATIONS[reason](reference)
    with pytest.raises(InputError, match=reason):
        FastTransformer.from_reference(reference)


def test_from_reference_takes_what_runs_as_the_reference_does():
    reference = make_reference(CONFIG).train()
    FastTransformer.from_reference(copy.deepcopy(reference))
    FastTransformer.from_reference(pickle.loads(pickle.dumps(reference)))
    FastTransformer.from_reference(FastTransformer.from_reference(reference))
    reference.note = "an attribute that no forward reads"
    reference.compile()
    reference.__class__ = Renamed
    assert FastTransformer.from_reference(reference).training
    mixed = make_reference(CONFIG)
    mixed.final_norm.double()  # shared as it is: the call itself decides
    assert FastTransformer.from_reference(mixed).final_norm.weight.dtype == torch.float64


def test_from_reference_says_what_does_not_fit():
    reference = make_reference(CONFIG)
    del reference.config
    with pytest.raises(InputError, match="without a config attribute"):
        FastTransformer.from_reference(reference)
    with pytest.raises(InputError, match=r"lack .*layers\.2"):
        FastTransformer.from_reference(reference, config=small(num_layers=3))
    with pytest.raises(InputError, match=r"ffn_in\.weight: given shape \(48, 32\)"):
        FastTransformer.from_reference(reference, config=small(ffn_dim=40))
    with pytest.raises(InputError, match="add"):
        FastTransformer.from_reference(reference, config=small(num_layers=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"policy": "fast"},
            r"^FastTransformer\.policy = 'fast', but it must be one of strict, eligible",
        ),
        ({"launch": {"packed_qkv": True}}, "needs a route"),
        ({"launch": 3, "route": "sdpa"}, "launch = 3, but it must be None or a mapping"),
        ({"route": "nope"}, r"FastTransformer\.route = 'nope', .* None or one of fused, .*dense"),
        ({"admissions": "rows.json"}, r"must be None or Admissions, such as Admissions\.load"),
        ({"working_set_bytes": -1}, r"FastTransformer\.working_set_bytes = -1, .* at least 1"),
        ({"working_set_bytes": 2.5}, "working_set_bytes = 2.5, but it must be an integer"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        FastTransformer(CONFIG, **options)


def bad_masks():
    good = masks(3, 24)["right_padded"]
    return {
        "shape": (good[:, :-1], r"shape \(3, 23\).*expected shape \(3, 24\)"),
        "rank": (good[:, :, None], r"shape \(3, 24, 1\)"),
        "dtype": (good.float(), "torch.float32.*expected .*torch.bool"),
        "device": (good.to("meta"), "on meta.*on cpu"),
        "type": (good.tolist(), "given list"),
    }


@pytest.mark.parametrize("policy", ["strict", "eligible"])
@pytest.mark.parametrize("what", bad_masks())
def test_a_mask_that_does_not_fit(what, policy):
    mask, message = bad_masks()[what]
    _, model = make_pair(CONFIG, policy=policy)
    with pytest.raises(InputError, match=message):
        model(make_inputs(CONFIG, 1)[0], mask)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(24, 32), r"shape \(24, 32\); expected \[batch, tokens, 32\]"),
        (torch.zeros(3, 24, 31), r"shape \(3, 24, 31\)"),
        (torch.zeros(3, 24, 32, dtype=torch.int64), "given int64; expected float32"),
        (torch.zeros(3, 24, 32, dtype=torch.float64), r"float64; expected torch\.float32"),
        (torch.zeros(3, 24, 32, device="meta"), "given meta; expected cpu"),
    ],
)
def test_an_input_that_does_not_fit(x, message):
    _, model = make_pair(CONFIG)
    with pytest.raises(InputError, match=message):
        model(x)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (None, "x: given NoneType; expected a dense tensor"),
        ([[1.0]], "given list; .*torch.as_tensor"),
        (np.zeros((3, 24, 32), dtype=np.float32), "given ndarray"),
        (torch.zeros(3, 24, 32).to_sparse(), r"layout torch\.sparse_coo; .*\.to_dense\(\)"),
        (
            torch.nested.nested_tensor([torch.zeros(9, 32)], layout=torch.jagged),
            "nested tensor; .*to_padded_tensor.*valid_token_mask",
        ),
    ],
    ids=["None", "list", "NumPy", "sparse", "nested"],
)
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_an_input_that_is_no_dense_tensor(x, message, warm):
    _, model = make_pair(CONFIG)
    with torch.no_grad():
        if warm:
            model(make_inputs(CONFIG, 1)[0])
        for call in (model, model.explain):
            with pytest.raises(InputError, match=message):
                call(x)


def test_sizes_may_be_numpys():
    fields = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}
    given = SimpleNamespace(**{**fields, "d_model": np.int64(32), "num_heads": np.int32(4)})
    model = FastTransformer(given, policy="eligible", working_set_bytes=np.int64(2**20)).eval()
    assert model.config is given
    assert type(model.working_set_bytes) is int
    x, _ = make_inputs(CONFIG, 1)
    with torch.no_grad():
        assert_accepted(model(x), ReferenceTransformer.forward(model, x))
    assert model.last_decision.route == "sdpa"


def test_gradients_under_an_inference_only_route():
    _, model = make_pair(CONFIG, route="sdpa")
    x, _ = make_inputs(CONFIG, 1)
    with pytest.raises(RouteError, match="autograd would record this call"):
        model(x.requires_grad_())
    with torch.no_grad():
        model(x)


def test_gradients_are_the_references():
    reference, model = make_pair(CONFIG)
    x, mask = make_inputs(CONFIG, 1, padding_ratio=0.5)
    model(x, mask).square().sum().backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    reference.zero_grad()
    reference(x, mask).square().sum().backward()
    for name, parameter in reference.named_parameters():
        assert torch.equal(ours[name], parameter.grad)


def test_autocast_takes_the_reference_arithmetic():
    reference, model = make_pair(CONFIG)
    x, _ = make_inputs(CONFIG, 1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), reference(x))
    assert model.last_decision.route == "dense"
    assert model.last_decision.contract.autocast == "bfloat16"


def test_deterministic_mode_takes_the_reference_arithmetic():
    reference, model = make_pair(CONFIG)
    x, _ = make_inputs(CONFIG, 1)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad():
            assert torch.equal(model(x), reference(x))
    finally:
        torch.use_deterministic_algorithms(False)
    assert model.last_decision.route == "dense"


def test_function_transforms_take_the_reference_arithmetic():
    reference, model = make_pair(CONFIG)
    model.requires_grad_(False)
    x, _ = make_inputs(CONFIG, 1)
    got = torch.func.vmap(model)(x[None].expand(2, -1, -1, -1))
    assert_accepted(got[1], reference(x))
    assert model.last_decision.route == "dense"
    assert "torch.func" in model.last_decision.contract.altered


def test_tensor_subclasses_take_the_reference_arithmetic():
    class Tagged(torch.Tensor):
        pass

    reference, model = make_pair(CONFIG)
    x, _ = make_inputs(CONFIG, 1)
    with torch.no_grad():
        got = model(x.as_subclass(Tagged))
        assert_accepted(got.as_subclass(torch.Tensor), reference(x))
    assert isinstance(got, Tagged)
    assert "Tagged" in model.last_decision.contract.altered


@pytest.mark.parametrize("shape", [(0, 24, 32), (3, 0, 32)])
def test_empty_inputs(shape):
    reference, model = make_pair(CONFIG)
    x = torch.zeros(shape)
    with torch.no_grad():
        assert model(x).shape == reference(x).shape == shape
        assert model(x, torch.ones(shape[:2], dtype=torch.bool)).shape == shape
    assert model.last_decision.route == "dense"


def test_an_extreme_shape_is_rejected_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(model_module, "_available", lambda device: 2**20)
    config = small(batch_size=1, seq_len=40_000, d_model=8, num_heads=2)
    x = torch.zeros(1, 40_000, 8)
    for policy in ("strict", "eligible"):
        model = FastTransformer(config, policy=policy).eval()
        with torch.no_grad(), pytest.raises(UnsafeFallbackError) as caught:
            model(x)
        assert caught.value.needed_bytes > 2 * config.score_bytes()
        assert "40000" in str(caught.value)


def test_free_memory_is_looked_at_again(monkeypatch):
    available = 2**40
    monkeypatch.setattr(model_module, "_available", lambda device: available)
    monkeypatch.setattr(model_module, "_MEMORY_SHARE", 2**40)
    _, model = make_pair(CONFIG)
    x, _ = make_inputs(CONFIG, 1)
    with torch.no_grad():
        model(x)
        available = 2**10
        with pytest.raises(UnsafeFallbackError):
            model(x)
        available = 2**40
        model(x)


def test_shapes_propagate_on_the_meta_device():
    model = FastTransformer(CONFIG, policy="eligible").to("meta")
    assert model(torch.zeros(3, 24, 32, device="meta")).shape == (3, 24, 32)
    assert model.last_decision.route == "dense"


def test_device_facts():
    facts = probe("cpu")
    assert facts.type == "cpu"
    assert facts.name
    assert 0 < free_bytes("cpu") <= facts.memory_bytes
    assert probe("meta").memory_bytes == 0


def test_explain_and_last_decision():
    precision = Precision("highest", False)
    case = CASES[12]
    row = Admission(
        probe("cpu").name,
        precision,
        12,
        "sdpa",
        {"packed_qkv": True, "linear": "aten", "execution": "eager"},
        "baselines/here.json#12",
    )
    model = FastTransformer(case, admissions=Admissions((row,))).eval()
    assert model.last_decision is None
    x, mask = make_inputs(case, 1, padding_ratio=0.5)
    with torch.no_grad():
        text = model.explain(x, mask)
        assert model.last_decision is None
        model(x, mask)
    assert text == model.last_decision.explain()
    assert "(case 12)" in text
    assert "mask right_padded" in text
    assert "route:    sdpa (packed_qkv=True, linear=aten, execution=eager)" in text
    assert "admitted by baselines/here.json#12" in text
    assert "rejected: batch_stream: the whole batch needs" in text
    with torch.enable_grad():
        model(x, mask)
    assert model.last_decision.route == "dense"


def test_a_warm_call_decides_nothing(monkeypatch):
    _, model = make_pair(CONFIG)
    x, _ = make_inputs(CONFIG, 1)
    with torch.no_grad():
        model(x)
        monkeypatch.setattr(model_module, "decide", None)
        for _ in range(3):
            model(x)
        with pytest.raises(TypeError):
            model(x[:2])


def test_remembered_decisions_are_bounded():
    _, model = make_pair(small(num_layers=1))
    with torch.no_grad():
        for tokens in range(1, model_module._PLANS + 20):
            model(torch.zeros(1, tokens, 32))
    assert len(model._runtime.plans) == model_module._PLANS


class ForeignConfig(SimpleNamespace):
    """A configuration as a benchmark script elsewhere defines it."""


class ForeignAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.num_heads
        for part in ("q", "k", "v", "out"):
            setattr(self, f"{part}_proj", nn.Linear(c.d_model, c.d_model))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (
            p(x).view(b, n, self.heads, -1).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        s = q @ k.mT / (d // self.heads) ** 0.5
        s = s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
        return self.out_proj((s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


class ForeignBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attention = ForeignAttention(c)
        self.ffn_in = nn.Linear(c.d_model, c.ffn_dim)
        self.ffn_out = nn.Linear(c.ffn_dim, c.d_model)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.ffn_out(nn.functional.gelu(self.ffn_in(self.norm2(x))))


class BaselineTransformer(nn.Module):
    """The baseline of a script that knows nothing of fastlayer."""

    def __init__(self, c):
        super().__init__()
        self.layers = nn.ModuleList(ForeignBlock(c) for _ in range(c.num_layers))
        self.final_norm = nn.LayerNorm(c.d_model)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.final_norm(x)


@pytest.mark.parametrize("wrap", [lambda m: m, torch.compile], ids=["plain", "compiled"])
def test_a_script_elsewhere_swaps_the_model_in(wrap):
    config = ForeignConfig(
        batch_size=3, seq_len=24, d_model=32, num_heads=4, ffn_dim=48, num_layers=2, causal=True
    )
    torch.manual_seed(1234)
    baseline = BaselineTransformer(config).eval()
    fast = FastTransformer(config, policy="eligible").eval()
    fast.load_state_dict(baseline.state_dict(), strict=True)
    baseline.load_state_dict(fast.state_dict(), strict=True)
    shared = FastTransformer.from_reference(baseline, config=config, policy="eligible")
    x, _ = make_inputs(config, 1234)
    with torch.no_grad():
        assert_accepted(wrap(fast)(x), baseline(x))
        assert_accepted(wrap(shared)(x), baseline(x))
    assert fast.last_decision.route == shared.last_decision.route == "sdpa"
    assert isinstance(fast, ReferenceTransformer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_foreign_class_is_taken_at_its_word_but_not_its_instances_patches():
    config = ForeignConfig(
        batch_size=3, seq_len=24, d_model=32, num_heads=4, ffn_dim=48, num_layers=2, causal=True
    )
    for patch, reason in (
        (lambda m: m.register_forward_hook(lambda *_: None), "the model carries a hook"),
        (lambda m: setattr(m, "forward", abs), "the model carries a forward of its own"),
        (lambda m: setattr(m.layers[0], "forward", abs), "layers.0 carries a forward"),
    ):
        baseline = BaselineTransformer(config).eval()
        FastTransformer.from_reference(baseline, config=config)
        patch(baseline)
        with pytest.raises(InputError, match=reason):
            FastTransformer.from_reference(baseline, config=config)
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    assert alterations.instance_alteration(scripted) == ""

"""The oracle is the reference: to rounding, for every kind of mask, whatever its blocks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from extreme_support import inputs, masks, reference

from fastlayer import FastTransformer, InputError, ReferenceTransformer, TransformerConfig
from fastlayer.oracle import Oracle
from fastlayer.reference import ReferenceAttention

SMALL = TransformerConfig(3, 37, 24, 3, 40, 2, True)

#: Largest absolute difference: summation order inside float32 products, through two layers and the
#: last normalisation of values near one. A hundredth of the acceptance's absolute tolerance.
BOUND = 2e-5

MASKS = masks(3, 37)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("workspace", [3 * 37 * 4, 12_000, 2**30])
def test_equals_the_reference_for_every_mask(kind: str, causal: bool, workspace: int) -> None:
    model = reference(replace(SMALL, causal=causal))
    x = inputs(SMALL)
    expected = model(x, MASKS[kind])
    result = Oracle(model, workspace_bytes=workspace)(x, MASKS[kind])
    torch.testing.assert_close(result, expected, rtol=0.0, atol=BOUND)


@pytest.mark.parametrize("tokens", [1, 2, 17, 333])
@pytest.mark.parametrize(("width", "heads", "ffn"), [(96, 3, 16), (32, 1, 64)])
def test_odd_shapes(tokens: int, width: int, heads: int, ffn: int) -> None:
    config = TransformerConfig(2, tokens, width, heads, ffn, 2, True)
    model = reference(config)
    x = inputs(config)
    result = Oracle(model, workspace_bytes=100_000)(x)
    torch.testing.assert_close(result, model(x), rtol=0.0, atol=BOUND)


def test_case_14_reduced() -> None:
    """Its width and heads at N = 1,024, in blocks of a few hundred rows."""
    config = TransformerConfig(1, 1024, 1024, 16, 1024, 2, True)
    model = reference(config, biases=False)
    x = inputs(config)
    result = Oracle(model, workspace_bytes=16 * 2**20)(x)
    torch.testing.assert_close(result, model(x), rtol=0.0, atol=BOUND)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rounds_as_the_reference_does_in_other_dtypes(dtype: torch.dtype) -> None:
    """Probabilities come from a float32 softmax and are rounded to the model's dtype."""
    model = reference(SMALL).to(dtype)
    x = inputs(SMALL).to(dtype)
    result = Oracle(model, workspace_bytes=20_000)(x)
    assert result.dtype == dtype
    bound = {torch.float64: 1e-6, torch.bfloat16: 0.07}[dtype]
    torch.testing.assert_close(result, model(x), rtol=0.0, atol=bound)


def test_shares_parameters_and_records_no_gradient() -> None:
    model = reference(SMALL).requires_grad_(True)
    oracle = Oracle(model)
    x = inputs(SMALL)
    before = oracle(x)
    assert not before.requires_grad
    assert oracle.config == SMALL
    with torch.no_grad():
        model.layers[0].ffn_in.weight.mul_(2.0)
    assert not torch.equal(oracle(x), before)
    torch.testing.assert_close(oracle(x), model(x).detach(), rtol=0.0, atol=BOUND)


def test_the_scores_never_exceed_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    softmax = torch.softmax

    def watched(scores: torch.Tensor, dim: int) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, scores.numel() * scores.element_size())
        return softmax(scores, dim=dim)

    monkeypatch.setattr(torch, "softmax", watched)
    config = replace(SMALL, seq_len=333)
    Oracle(reference(config), workspace_bytes=60_000)(inputs(config))
    assert 0 < 3 * largest <= 60_000


def test_errors_say_what_to_do() -> None:
    model = reference(SMALL)
    for size in (0, -1, 1e9, float("nan"), "5", True):
        with pytest.raises(InputError, match="an integer of at least 1"):
            Oracle(model, workspace_bytes=size)
    with pytest.raises(InputError, match=r"at least 444, one row .* 37 tokens"):
        Oracle(model, workspace_bytes=443)(inputs(SMALL))
    with pytest.raises(InputError, match=r"\[batch, tokens, 24\]"):
        Oracle(model)(torch.zeros(2, 3, 25))
    with pytest.raises(InputError, match="valid_token_mask"):
        Oracle(model)(torch.zeros(2, 3, 24), torch.ones(2, 4, dtype=torch.bool))


@pytest.mark.parametrize(
    "x",
    [[1.0], torch.zeros(2, 3, 24).to_sparse(), torch.zeros(3, 24)],
    ids=["list", "sparse", "2d"],
)
def test_inputs_are_dense_tensors(x: object) -> None:
    with pytest.raises(InputError, match=r"x: given .* \[batch, tokens, 24\]"):
        Oracle(reference(SMALL))(x)


@pytest.mark.parametrize("convert", [torch.Tensor.float, torch.Tensor.int, torch.Tensor.tolist])
@pytest.mark.parametrize("kind", ["full", "holed"])
def test_masks_are_bool_whatever_they_hold(kind: str, convert: Callable) -> None:
    with pytest.raises(InputError, match=r"valid_token_mask: given .* torch.bool, on cpu"):
        Oracle(reference(SMALL))(inputs(SMALL), convert(MASKS[kind]))


@pytest.mark.parametrize(("batch", "tokens"), [(0, 5), (2, 0), (0, 0)])
def test_nothing_is_answered_with_nothing(batch: int, tokens: int) -> None:
    model = reference(SMALL)
    x = torch.zeros(batch, tokens, 24)
    for mask in (None, torch.ones(batch, tokens, dtype=torch.bool)):
        assert torch.equal(Oracle(model)(x, mask), model(x, mask))


def test_values_that_are_not_finite_reach_the_rows_that_the_docstring_says() -> None:
    model = reference(SMALL)
    x, bad = inputs(SMALL), float("inf")
    mask = torch.ones(3, 37, dtype=torch.bool)
    mask[:, 30:] = False
    expected = model(x, mask)
    x[0, 33] = bad  # not read: it follows the last valid token
    x[1, 20] = bad  # read by its own block of rows and by later ones
    assert model(x, mask)[:2, :30].isnan().all()
    row = 3 * 4 * 30
    result = Oracle(model, workspace_bytes=row)(x, mask)
    torch.testing.assert_close(result[0], expected[0], rtol=0.0, atol=BOUND)
    torch.testing.assert_close(result[1, :20], expected[1, :20], rtol=0.0, atol=BOUND)
    assert result[1, 20:30].isnan().all()
    torch.testing.assert_close(result[2], expected[2], rtol=0.0, atol=BOUND)


class Doubled(ReferenceTransformer):
    def forward(self, x: torch.Tensor, valid_token_mask: object = None) -> torch.Tensor:
        return super().forward(x, valid_token_mask) * 2


class DoubledAttention(ReferenceAttention):
    def forward(self, x: torch.Tensor, valid_token_mask: object = None) -> torch.Tensor:
        return super().forward(x, valid_token_mask) * 2


ALTERATIONS = {
    "class Doubled has a forward": lambda m: setattr(m, "__class__", Doubled),
    "attention is DoubledAttention": lambda m: setattr(
        m.layers[0].attention, "__class__", DoubledAttention
    ),
    "model carries a forward": lambda m: setattr(m, "forward", abs),
    "model carries a hook": lambda m: m.register_forward_hook(lambda *_: None),
    "attention carries a forward": lambda m: setattr(m.layers[1].attention, "forward", abs),
    "layers.1 carries a hook": lambda m: m.layers[1].register_forward_hook(lambda *_: None),
    "attention has head_dim = 4": lambda m: setattr(m.layers[0].attention, "head_dim", 4),
    "ffn_in is Identity": lambda m: setattr(m.layers[0], "ffn_in", torch.nn.Identity()),
    "layers.2 is not part": lambda m: m.layers.append(m.layers[0]),
}


@pytest.mark.parametrize("reason", ALTERATIONS)
def test_a_judge_is_the_reference_itself(reason: str) -> None:
    model = reference(SMALL)
    oracle = Oracle(model)
    ALTERATIONS[reason](model)
    with pytest.raises(InputError, match=reason):
        oracle(inputs(SMALL))
    with pytest.raises(InputError, match=reason):
        Oracle(model)


def test_hooks_on_all_modules_and_patched_classes_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    oracle, x = Oracle(reference(SMALL)), inputs(SMALL)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(InputError, match="hook is registered for all modules"):
            oracle(x)
    finally:
        handle.remove()
    oracle(x)
    monkeypatch.setattr(ReferenceAttention, "forward", lambda self, x, mask=None: x)
    with pytest.raises(InputError, match="method of the class ReferenceAttention was replaced"):
        oracle(x)


class Foreign(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.layers, self.final_norm, self.config = model.layers, model.final_norm, model.config


def test_plain_references_work_in_any_mode_copied_pickled_or_of_another_class() -> None:
    model, x = reference(SMALL), inputs(SMALL)
    expected = model(x, MASKS["holed"])
    plain = {
        "train": copy.deepcopy(model).train(),
        "copied": copy.deepcopy(model),
        "pickled": pickle.loads(pickle.dumps(model)),
        "fast": FastTransformer.from_reference(model),
        "foreign": Foreign(model),
        "marked to compile": copy.deepcopy(model),
    }
    plain["marked to compile"].compile()
    for each in plain.values():
        oracle = Oracle(each)
        for judge in (oracle, copy.deepcopy(oracle), pickle.loads(pickle.dumps(oracle))):
            result = judge(x, MASKS["holed"])
            torch.testing.assert_close(result, expected, rtol=0.0, atol=BOUND)
    foreign = plain["foreign"]
    foreign.layers[0].attention.forward = abs
    with pytest.raises(InputError, match="attention carries a forward"):
        Oracle(foreign)


def test_parts_replaced_later_are_followed() -> None:
    model, x = reference(SMALL), inputs(SMALL)
    oracle = Oracle(model)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.mul_(1.5)
    model.layers, model.final_norm = other.layers, other.final_norm
    torch.testing.assert_close(oracle(x), model(x), rtol=0.0, atol=BOUND)
    assert next(oracle.parameters()) is next(model.parameters())


def test_parameters_have_the_references_names_and_storage() -> None:
    model = reference(TransformerConfig(1, 5, 16, 2, 16, 2))
    oracle = Oracle(model)
    theirs = dict(model.named_parameters())
    assert {name: id(one) for name, one in oracle.named_parameters()} == {
        name: id(one) for name, one in theirs.items()
    }
    twin = copy.deepcopy(oracle).double()
    x = torch.randn(1, 5, 16)
    assert twin(x.double()).dtype == torch.float64
    torch.testing.assert_close(twin(x.double()).float(), model(x), rtol=0, atol=1e-5)
    assert next(model.parameters()).dtype == torch.float32

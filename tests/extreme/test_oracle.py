"""The oracle is the reference: to rounding, for every kind of mask, whatever its blocks."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from extreme_support import inputs, masks, reference

from fastlayer import InputError, TransformerConfig
from fastlayer.oracle import Oracle

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
    with pytest.raises(InputError, match="at least 1"):
        Oracle(model, workspace_bytes=0)
    with pytest.raises(InputError, match=r"at least 444, one row .* 37 tokens"):
        Oracle(model, workspace_bytes=443)(inputs(SMALL))
    with pytest.raises(InputError, match=r"\[batch, tokens, 24\]"):
        Oracle(model)(torch.zeros(2, 3, 25))
    with pytest.raises(InputError, match="valid_token_mask"):
        Oracle(model)(torch.zeros(2, 3, 24), torch.ones(2, 4, dtype=torch.bool))


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

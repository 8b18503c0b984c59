"""Folded operands against the model they came from, and the bound on scores."""

from __future__ import annotations

import math

import pytest
import torch

from fastlayer import CASES, ReferenceTransformer, TransformerConfig
from fastlayer.kernels.knobs import Launch, sizes_for
from fastlayer.kernels.packing import pack
from fastlayer.kernels.sizes import FusedSizes, power_of_two


def _model(config: TransformerConfig) -> ReferenceTransformer:
    torch.manual_seed(7)
    model = ReferenceTransformer(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def _sizes(config: TransformerConfig) -> FusedSizes:
    return sizes_for(Launch("single"), config)


def test_powers_of_two() -> None:
    assert [power_of_two(n) for n in (1, 2, 3, 16, 17, 128)] == [1, 2, 4, 16, 32, 128]


@pytest.mark.parametrize("heads", [1, 3, 6, 12])
def test_folded_projections_give_the_scores_of_the_model(heads: int) -> None:
    """Nothing but the norm's affine part is folded, so that the same numbers are rounded."""
    config = TransformerConfig(1, 9, 96, heads, 80, 1)
    model, sizes = _model(config), _sizes(config)
    weights = pack(model.state_dict(), sizes)
    x = torch.randn(9, 96, dtype=torch.float64)
    layer = model.layers[0]
    normal = torch.nn.functional.layer_norm(x, (96,))
    g = sizes.heads_width
    q = normal @ weights.qkv[0, :96, :g].double() + weights.biases[0, :g].double()
    columns = slice(g, 2 * g)
    k = normal @ weights.qkv[0, :96, columns].double() + weights.biases[0, columns].double()
    h = layer.norm1(x)
    for head in range(heads):
        own = slice(head * config.head_dim, (head + 1) * config.head_dim)
        exact = layer.attention.q_proj(h)[:, own] @ layer.attention.k_proj(h)[:, own].T
        start = head * sizes.padded_head
        folded = q[:, start : start + sizes.padded_head] @ k[:, start : start + sizes.padded_head].T
        assert (folded - exact).abs().max() < 2e-2
        assert sizes.score_scale == pytest.approx(config.head_dim**-0.5 * math.log2(math.e))


def test_values_are_the_model_s_to_the_last_bias() -> None:
    """So that rounding them rounds what the reference rounds."""
    config = TransformerConfig(1, 9, 96, 3, 80, 1)
    model, sizes = _model(config), _sizes(config)
    weights = pack(model.state_dict(), sizes)
    x = torch.randn(9, 96, dtype=torch.float64)
    layer, g = model.layers[0], sizes.heads_width
    normal = torch.nn.functional.layer_norm(x, (96,))
    columns = slice(2 * g, 3 * g)
    v = normal @ weights.qkv[0, :96, columns].double() + weights.biases[0, columns].double()
    exact = layer.attention.v_proj(layer.norm1(x))
    assert (v[:, :96] - exact).abs().max() < 5e-3
    assert v[:, 96:].abs().max() == 0


def test_scores_never_exceed_the_bound_and_may_come_near_it() -> None:
    config = TransformerConfig(1, 2, 32, 2, 32, 1)
    model, sizes = _model(config), _sizes(config)
    weights = pack(model.state_dict(), sizes)
    g = sizes.heads_width
    wq, wk = weights.qkv[0, :, :g].double(), weights.qkv[0, :, g : 2 * g].double()
    bq, bk = weights.biases[0, :g].double(), weights.biases[0, g : 2 * g].double()
    scale = 16**-0.5 * math.log2(math.e)

    def score(rows: torch.Tensor) -> torch.Tensor:
        q, k = torch.nn.functional.layer_norm(rows, (32,)).unbind(1)
        both = scale * (q @ wq + bq) * (k @ wk + bk)
        return both.reshape(-1, 2, 16).sum(2).abs().amax()

    bound = weights.score_bounds[0]
    assert score(torch.randn(20_000, 2, 32, dtype=torch.float64)) <= bound
    rows = torch.randn(256, 2, 32, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([rows], lr=0.1)
    for _ in range(150):
        optimiser.zero_grad()
        worst = score(rows)
        (-worst).backward()
        optimiser.step()
    assert 0.5 * bound < worst <= bound


@pytest.mark.parametrize(
    ("case", "bound"), [(7, 10.9), (9, 15.1), (10, 17.2), (1, 20.5), (11, 31.0)]
)
def test_bounds_of_the_disclosed_cases(case: int, bound: float) -> None:
    """At the default initialisation all are proven to need no maximum where keys come at once."""
    torch.manual_seed(1234)
    model = ReferenceTransformer(CASES[case])
    weights = pack(model.state_dict(), _sizes(CASES[case]))
    assert max(weights.score_bounds) == pytest.approx(bound, abs=0.1)


def test_a_weight_beyond_float16_is_reported() -> None:
    config = TransformerConfig(1, 4, 32, 2, 32, 1)
    model = _model(config)
    assert not pack(model.state_dict(), _sizes(config)).overflow
    with torch.no_grad():
        model.layers[0].norm2.weight[3] = 1e7
    assert pack(model.state_dict(), _sizes(config)).overflow

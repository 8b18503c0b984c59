"""The reference against a second implementation, written one token at a time."""

from __future__ import annotations

import math

import pytest
import torch
from layer_support import make_reference, masks, small

from fastlayer import CASES, ReferenceTransformer, make_inputs


def naive(model: ReferenceTransformer, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The same arithmetic from the definition, in loops over samples, heads and queries."""
    state = {name: value.double() for name, value in model.state_dict().items()}
    config = model.config
    head_dim = config.d_model // config.num_heads

    def norm(t, name):
        centred = t - t.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred / (variance + 1e-5).sqrt() * state[f"{name}.weight"] + state[f"{name}.bias"]

    def linear(t, name):
        return t @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def gelu(t):
        return 0.5 * t * (1 + torch.erf(t / math.sqrt(2)))

    def attention(t, valid, name):
        q, k, v = (linear(t, f"{name}.{part}_proj") for part in "qkv")
        context = torch.zeros_like(t)
        for head in range(config.num_heads):
            columns = slice(head * head_dim, (head + 1) * head_dim)
            for query in range(len(t)):
                keys = [
                    key
                    for key in range(len(t))
                    if valid[key] and (key <= query or not config.causal)
                ]
                if keys:
                    scores = k[keys, columns] @ q[query, columns] / math.sqrt(head_dim)
                    context[query, columns] = torch.softmax(scores, 0) @ v[keys, columns]
        return linear(context, f"{name}.out_proj") * valid[:, None]

    out = []
    for index, sample in enumerate(x.double()):
        valid = torch.ones(len(sample), dtype=torch.bool) if mask is None else mask[index]
        h = sample
        for layer in range(config.num_layers):
            name = f"layers.{layer}"
            h = h + attention(norm(h, f"{name}.norm1"), valid, f"{name}.attention")
            hidden = gelu(linear(norm(h, f"{name}.norm2"), f"{name}.ffn_in"))
            h = (h + linear(hidden, f"{name}.ffn_out")) * valid[:, None]
        out.append(norm(h, "final_norm") * valid[:, None])
    return torch.stack(out)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", list(masks(3, 9)))
def test_against_the_definition(kind, causal):
    config = small(seq_len=9, causal=causal)
    model = make_reference(config)
    x, _ = make_inputs(config, 5)
    mask = masks(3, 9)[kind]
    with torch.no_grad():
        got = model(x, mask)
        torch.testing.assert_close(got.double(), naive(model, x, mask), atol=2e-5, rtol=1e-4)
    if mask is not None:
        assert not got[~mask].any()


def test_parameter_names_and_order():
    names = [name for name, _ in make_reference(small(num_layers=1)).named_parameters()]
    attention = [f"attention.{part}_proj" for part in ("q", "k", "v", "out")]
    owners = ["norm1", *attention, "norm2", "ffn_in", "ffn_out"]
    expected = [f"layers.0.{owner}.{leaf}" for owner in owners for leaf in ("weight", "bias")]
    assert names == [*expected, "final_norm.weight", "final_norm.bias"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_dtype_is_kept(dtype):
    config = small()
    x, mask = make_inputs(config, 5, padding_ratio=0.5, dtype=dtype)
    got = make_reference(config, dtype=dtype)(x, mask)
    assert got.dtype == dtype
    assert torch.isfinite(got).all()


def test_inputs_follow_the_recipe():
    config = CASES[12]
    x, mask = make_inputs(config, 1234, padding_ratio=0.5, input_scale=2.0)
    again, _ = make_inputs(config, 1234, padding_ratio=0.5, input_scale=2.0)
    generator = torch.Generator().manual_seed(1234)
    plain = torch.randn(64, 32, 128, generator=generator) * 2.0
    lengths = mask.sum(1)
    assert torch.equal(x, again)
    assert torch.equal(x[mask], plain[mask])
    assert not x[~mask].any()
    assert lengths.min() >= 16
    assert lengths.max() <= 32
    assert len(lengths.unique()) > 4
    assert (mask.int().diff(dim=1) <= 0).all()
    assert make_inputs(config, 1234)[1] is None
    with pytest.raises(ValueError, match="padding_ratio"):
        make_inputs(config, 1, padding_ratio=1.0)

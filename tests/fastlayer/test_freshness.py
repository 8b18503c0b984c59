"""Whatever happens to the parameters, the next call computes with them as they are."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from layer_support import assert_accepted, make_pair, make_reference, masks, small
from torch import nn
from torch.nn.utils import parametrizations, prune

from fastlayer import FastTransformer, ReferenceTransformer, make_inputs

CONFIG = small()


@pytest.fixture
def x():
    return make_inputs(CONFIG, 1)[0]


@pytest.fixture
def model():
    """A model that packs its weights, having run once."""
    _, model = make_pair(CONFIG)
    with torch.no_grad():
        model(make_inputs(CONFIG, 1)[0])
    assert model.last_decision.route == "sdpa"
    return model


def dense(model: FastTransformer, x: torch.Tensor) -> torch.Tensor:
    return ReferenceTransformer.forward(model, x)


def replace_parameter(model):
    model.layers[0].attention.k_proj.weight = nn.Parameter(torch.randn(32, 32) * 0.2)


def swap_data(model):
    model.layers[1].ffn_out.weight.data = torch.randn(32, 48) * 0.2


def replace_module(model):
    model.layers[0].ffn_in = nn.Linear(32, 48)


PLAIN_EDITS = {
    "in place": lambda m: m.layers[0].attention.q_proj.weight.mul_(3.0),
    "a slice in place": lambda m: m.layers[1].attention.v_proj.weight[3].fill_(0.5),
    "a bias": lambda m: m.layers[0].ffn_in.bias.add_(0.5),
    "a norm": lambda m: m.layers[0].norm2.weight.mul_(0.5),
    "the final norm": lambda m: m.final_norm.bias.sub_(1.0),
    "load_state_dict": lambda m: m.load_state_dict(
        {name: value * 1.3 for name, value in m.state_dict().items()}
    ),
    "load_state_dict by assignment": lambda m: m.load_state_dict(
        {name: value * 1.3 for name, value in m.state_dict().items()}, assign=True
    ),
    "a new parameter": replace_parameter,
    "new data": swap_data,
    "a new module": replace_module,
    "an optimiser's step": lambda m: torch.optim.SGD(
        [p.requires_grad_() for p in m.parameters()], lr=1.0, weight_decay=0.3
    ).step(),
}


@pytest.mark.parametrize("edit", PLAIN_EDITS.values(), ids=PLAIN_EDITS.keys())
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_edits_are_seen(model, x, edit, mode):
    before = dense(model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) * 0.1
        edit(model)
    with mode():
        after = model(x)
        assert model.last_decision.route == "sdpa"
        assert_accepted(after, dense(model, x))
    assert (after - before).abs().max() > 1e-3


def test_edits_within_inference_mode_are_seen(model, x):
    with torch.inference_mode():
        first = model(x)
        model.layers[0].attention.q_proj.weight.mul_(3.0)
        model.final_norm.bias.add_(1.0)
        assert_accepted(model(x), dense(model, x))
        assert not torch.equal(model(x), first)


def test_parameters_made_in_inference_mode_are_compared_by_value(x):
    with torch.inference_mode():
        model = FastTransformer(CONFIG, policy="eligible").eval()
        for _ in range(2):
            assert_accepted(model(x), dense(model, x))
            assert model.last_decision.route == "sdpa"
        version = model.last_decision.contract.weights_version
        model.layers[0].attention.q_proj.weight.mul_(3.0)
        assert_accepted(model(x), dense(model, x))
        assert model.last_decision.contract.weights_version > version


def test_an_unchanged_model_packs_once(model, x):
    with torch.no_grad():
        for _ in range(3):
            model(x)
            model(x[:1])
    assert model.last_decision.contract.weights_version == 1


def test_refresh_covers_writes_that_no_counter_sees(model, x):
    with torch.no_grad():
        model.layers[0].attention.q_proj.weight.data.mul_(3.0)
        model.refresh()
        assert_accepted(model(x), dense(model, x))


def test_conversion_to_another_dtype_and_back(model, x):
    with torch.no_grad():
        model.double()
        assert torch.equal(model(x.double()), dense(model, x.double()))
        assert model.last_decision.route == "dense"
        model.float()
        assert_accepted(model(x), dense(model, x))
        assert model.last_decision.route == "sdpa"


def adapter(model):
    class Adapter(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.down = nn.Linear(32, 2)
            self.up = nn.Linear(2, 32)

        def forward(self, t):
            return self.inner(t) + self.up(self.down(t))

    model.layers[0].attention.q_proj = Adapter(model.layers[0].attention.q_proj)


def hooked(model):
    model.layers[0].ffn_out.register_forward_hook(lambda module, args, output: output * 2)


ALTERATIONS = {
    "parametrization": lambda m: parametrizations.weight_norm(m.layers[0].ffn_in),
    "orthogonal": lambda m: parametrizations.orthogonal(m.layers[0].attention.k_proj),
    "pruning": lambda m: prune.l1_unstructured(m.layers[1].ffn_in, "weight", amount=0.5),
    "adapter": adapter,
    "hook": hooked,
    "epsilon": lambda m: setattr(m.layers[0], "norm1", nn.LayerNorm(32, eps=0.1)),
    "own forward": lambda m: setattr(m.layers[0], "norm1", nn.Identity()),
    "extra layer": lambda m: m.layers.append(copy.deepcopy(m.layers[0])),
}


@pytest.mark.parametrize("alter", ALTERATIONS.values(), ids=ALTERATIONS.keys())
def test_an_altered_module_tree_takes_the_reference_arithmetic(model, x, alter):
    alter(model)
    with torch.no_grad():
        assert torch.equal(model(x), dense(model, x))
    assert model.last_decision.route == "dense"
    assert model.last_decision.contract.altered in model.last_decision.explain()


def test_a_removed_parametrization_restores_the_fast_route(model, x):
    linear = model.layers[0].ffn_in
    parametrizations.weight_norm(linear)
    with torch.no_grad():
        model(x)
    nn.utils.parametrize.remove_parametrizations(linear, "weight")
    with torch.no_grad():
        assert_accepted(model(x), dense(model, x))
    assert model.last_decision.route == "sdpa"


def test_new_values_at_the_same_address(model, x):
    with torch.no_grad():
        x.mul_(0.5).add_(0.1)
        assert_accepted(model(x), dense(model, x))


def test_a_mask_written_in_place(model, x):
    reference = make_reference(CONFIG)
    mask = masks(3, 24)["full"]
    with torch.no_grad():
        for write in (
            lambda: None,
            lambda: mask[0, 9:].fill_(False),
            lambda: mask[1, 2].fill_(False),
            lambda: mask.fill_(False),
            lambda: mask.fill_(True),
        ):
            write()
            assert_accepted(model(x, mask), reference(x, mask))


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), copy.copy],
    ids=["deepcopy", "pickle", "copy"],
)
def test_copies_stand_on_their_own(model, x, copied):
    twin = copied(model)
    assert twin.policy == model.policy
    assert twin.last_decision is None
    with torch.no_grad():
        first = model(x)
        assert_accepted(twin(x), first)
        twin.final_norm.bias.data = twin.final_norm.bias + 1.0
        assert_accepted(twin(x), dense(twin, x))
        assert model._runtime is not twin._runtime


def test_a_checkpoint_of_a_copy(model, x, tmp_path):
    path = tmp_path / "model.pt"
    torch.save(model, path)
    loaded = torch.load(path, weights_only=False)
    with torch.no_grad():
        assert_accepted(loaded(x), model(x))


def test_requires_grad_decides_anew(model, x):
    model.requires_grad_(False)
    assert not model(x).requires_grad
    assert model.last_decision.route == "sdpa"
    model.final_norm.weight.requires_grad_(True)
    model(x).sum().backward()
    assert model.last_decision.route == "dense"
    assert model.final_norm.weight.grad is not None
    model.requires_grad_(False)
    x.requires_grad_(True)
    model(x).sum().backward()
    assert model.last_decision.route == "dense"
    assert x.grad is not None

"""Whatever happens to the parameters, the next call computes with them as they are."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from layer_support import assert_accepted, make_pair, make_reference, masks, small
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.utils import parametrizations, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastlayer import FastTransformer, InputError, ReferenceTransformer, make_inputs
from fastlayer.reference import ReferenceAttention, ReferenceBlock

CONFIG = small()


@pytest.fixture
def x():
    return make_inputs(CONFIG, 1)[0]


@pytest.fixture(params=["", "ahead", "proved"])
def _ahead(request, monkeypatch):
    """Whether warm calls run before anything is looked over, as those on a GPU do.

    There compiled code looks, as it does here where "proved".
    """
    if request.param == "proved":
        prover = pytest.importorskip("fastlayer.kernels.unchanged").compiled()
        if prover is None:
            pytest.skip("no C compiler")
    if request.param:
        bound = FastTransformer._bound

        def ahead(decision, runtime):
            plan = bound(decision, runtime)
            plan.ahead = True
            if request.param == "proved":
                runtime.state.prove_by(prover)
            return plan

        monkeypatch.setattr(FastTransformer, "_bound", staticmethod(ahead))


@pytest.fixture
def model(_ahead):
    """A model that packs its weights, having run once."""
    _, model = make_pair(CONFIG)
    with torch.no_grad():
        for _ in range(2):  # the second leaves what later ones are compared with
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


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_of_an_optimizer_is_seen(model, x, kind, fused):
    """Fused kernels write to parameters without raising their version counters."""
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, fused=fused)
    with torch.no_grad():
        before = model(x)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        after = model(x)
        assert_accepted(after, ReferenceTransformer.forward(model, x))
    assert not torch.equal(after, before)
    packed = model._runtime.state.version
    elsewhere = torch.optim.AdamW([nn.Parameter(torch.ones(3))], fused=False)
    elsewhere.step()
    with torch.no_grad():
        model(x)
    assert model._runtime.state.version == packed


def test_what_was_derived_while_another_thread_noticed_an_edit_is_not_kept(model):
    """``build`` stands for a packing in the middle of which the model changed."""
    state = model._runtime.state

    def build():
        state.invalidate()
        return "old"

    assert state.get("weights", build) == "old"
    assert state.get("weights", lambda: "new") == "new"


def test_transforms_over_parameters_take_the_reference_arithmetic(model, x):
    others = {name: value * 1.25 for name, value in model.named_parameters()}
    reference = make_reference(CONFIG)

    def loss(of):
        return lambda given: torch.func.functional_call(of, given, (x,)).square().sum()

    found, expected = torch.func.grad(loss(model))(others), torch.func.grad(loss(reference))(others)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)
    with torch.no_grad():
        assert_accepted(model(x), ReferenceTransformer.forward(model, x))
    assert "watched" not in model._runtime.state.altered


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


class OwnNorm(nn.LayerNorm):
    eps = property(lambda self: 0.1, lambda self, value: None)


ALTERATIONS = {
    "parametrization": lambda m: parametrizations.weight_norm(m.layers[0].ffn_in),
    "orthogonal": lambda m: parametrizations.orthogonal(m.layers[0].attention.k_proj),
    "pruning": lambda m: prune.l1_unstructured(m.layers[1].ffn_in, "weight", amount=0.5),
    "adapter": adapter,
    "hook": hooked,
    "epsilon": lambda m: setattr(m.layers[0], "norm1", nn.LayerNorm(32, eps=0.1)),
    "own forward": lambda m: setattr(m.layers[0], "norm1", nn.Identity()),
    "a scripted layer": lambda m: setattr(
        m.layers[0], "ffn_in", torch.jit.script(nn.Linear(32, 48))
    ),
    "a norm whose epsilon is a property": lambda m: setattr(m.layers[0], "norm1", OwnNorm(32)),
    "a setting deleted": lambda m: delattr(m.layers[0].norm1, "elementwise_affine"),
    "extra layer": lambda m: m.layers.append(copy.deepcopy(m.layers[0])),
}


@pytest.mark.parametrize("alter", ALTERATIONS.values(), ids=ALTERATIONS.keys())
def test_an_altered_module_tree_takes_the_reference_arithmetic(model, x, alter):
    alter(model)
    with torch.no_grad():
        for _ in range(2):
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


class Halved(nn.Linear):
    """Stands for the class that a quantiser swaps in."""

    def forward(self, t):
        return super().forward(t) * 0.5


class Backwards(nn.ModuleList):
    def __iter__(self):
        return reversed(list(super().__iter__()))


def forward_of_a_module(name):
    def alter(model):
        module = model.get_submodule(name)
        plain = module.forward
        module.forward = lambda *args: plain(*args).flip(-1)

    return alter


def setting(name, attribute, value):
    return lambda model: setattr(model.get_submodule(name), attribute, value)


def hook_in_a_new_dictionary(model):
    layer = model.layers[0].ffn_out
    layer._forward_hooks = OrderedDict()
    layer.register_forward_hook(lambda module, args, output: output * 2)


def split_otherwise(model):
    attention = model.layers[0].attention
    plain = attention._split_heads
    attention._split_heads = lambda t: plain(t).flip(1) * 0.5


def call_otherwise(model):
    layer = model.layers[0].ffn_in
    layer._call_impl = lambda t: nn.Linear.forward(layer, t) * 0.5


def forward_in_a_name_s_place(model):
    layer = model.layers[0].ffn_in
    del layer.in_features
    layer.forward = lambda t: nn.Linear.forward(layer, t) * 0.5


#: Edits of the module tree that leave every parameter as it is.
QUIET = {
    "attention's forward": forward_of_a_module("layers.1.attention"),
    "a linear's forward": forward_of_a_module("layers.0.ffn_in"),
    "a projection's forward": forward_of_a_module("layers.0.attention.v_proj"),
    "a block's forward": forward_of_a_module("layers.1"),
    "the final norm's forward": forward_of_a_module("final_norm"),
    "a forward in a name's place": forward_in_a_name_s_place,
    "a helper method": split_otherwise,
    "the call itself": call_otherwise,
    "epsilon": setting("layers.0.norm1", "eps", 0.5),
    "the final norm's epsilon": setting("final_norm", "eps", 0.5),
    "a class": setting("layers.0.ffn_in", "__class__", Halved),
    "the list's class": setting("layers", "__class__", Backwards),
    "causality": setting("layers.0.attention", "causal", False),
    "heads": lambda m: vars(m.layers[1].attention).update(num_heads=2, head_dim=16),
    "a hook in a new dictionary": hook_in_a_new_dictionary,
    "a pre-hook": lambda m: m.final_norm.register_forward_pre_hook(lambda m, args: args[0] ** 2),
}


@pytest.mark.parametrize("alter", QUIET.values(), ids=QUIET.keys())
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.usefixtures("_ahead")
def test_an_altered_call_takes_the_reference_arithmetic(x, alter, warm):
    _, model = make_pair(CONFIG)
    with torch.no_grad():
        plain = dense(model, x)
        for _ in range(2 * warm):
            model(x)
        alter(model)
        assert (dense(model, x) - plain).abs().max() > 1e-3, "the edit changes nothing"
        for _ in range(2):
            assert torch.equal(model(x), dense(model, x))
            assert model.last_decision.route == "dense"
    assert model.last_decision.contract.altered in model.last_decision.explain()


@pytest.mark.parametrize(
    ("kind", "method", "patched"),
    [
        (ReferenceBlock, "forward", lambda plain: lambda self, t, mask=None: plain(self, t) * 0.5),
        (ReferenceAttention, "forward", lambda plain: lambda self, t, mask=None: t * 0.5),
        (ReferenceAttention, "_split_heads", lambda plain: lambda self, t: plain(self, t) * 0.5),
        (nn.Linear, "forward", lambda plain: lambda self, t: plain(self, t) * 0.5),
        (nn.LayerNorm, "forward", lambda plain: lambda self, t: t),
        (nn.Linear, "__call__", lambda plain: lambda self, t: plain(self, t) * 0.5),
        (nn.Module, "_call_impl", lambda plain: lambda self, *a: plain(self, *a) * 0.5),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_method_patched_on_a_class(model, x, monkeypatch, kind, method, patched):
    with torch.no_grad():
        plain = dense(model, x)
        with monkeypatch.context() as patch:
            patch.setattr(kind, method, patched(getattr(kind, method)))
            changed = model.forward(x)
            assert torch.equal(changed, dense(model, x))
            assert model.last_decision.route == "dense"
            assert "was replaced" in model.last_decision.explain()
        assert (changed - plain).abs().max() > 1e-3
        assert_accepted(model(x), plain)
        assert model.last_decision.route == "sdpa"


@pytest.mark.parametrize(
    ("register", "hook"),
    [
        (
            register_module_forward_hook,
            lambda m, args, out: out * 2 if isinstance(m, nn.Linear) else None,
        ),
        (
            register_module_forward_pre_hook,
            lambda m, args: (args[0] * 2,) if isinstance(m, nn.Linear) else None,
        ),
    ],
    ids=["hook", "pre-hook"],
)
def test_hooks_for_all_modules(model, x, register, hook):
    with torch.no_grad():
        plain = dense(model, x)
        handle = register(hook)
        try:
            changed = model(x)
            assert torch.equal(changed, dense(model, x))
        finally:
            handle.remove()
        assert (changed - plain).abs().max() > 1e-3
        assert_accepted(model(x), plain)
        assert model.last_decision.route == "sdpa"


def test_a_setting_put_back_restores_the_fast_route(model, x):
    attention, norm = model.layers[0].attention, model.layers[0].norm1
    with torch.no_grad():
        attention.causal, norm.eps = False, 0.5
        model(x)
        assert "layers.0.attention has causal = False, not True" in model.explain(x)
        attention.causal = True
        assert "layers.0.norm1 has eps = 0.5, not 1e-05" in model.explain(x)
        norm.eps = 1e-5
        attention.forward = lambda *args: args[0]
        assert "layers.0.attention carries a forward of its own" in model.explain(x)
        del attention.forward
        assert_accepted(model(x), dense(model, x))
    assert model.last_decision.route == "sdpa"


def test_a_tag_alters_nothing_unless_a_forward_takes_its_place(model, x):
    layer = model.layers[0].ffn_in
    layer.compile()
    layer.tag = "mine"
    with torch.no_grad():
        model(x)
        assert model.last_decision.route == "sdpa"
        del layer.tag
        layer.forward = lambda t: nn.Linear.forward(layer, t) * 0.5
        layer._compiled_call_impl = None
        assert torch.equal(model(x), dense(model, x))


def test_parameters_in_a_new_dictionary(model, x):
    layer = model.layers[0].ffn_in
    layer._parameters = {
        "weight": nn.Parameter(layer.weight.detach() * 3),
        "bias": nn.Parameter(layer.bias.detach()),
    }
    with torch.no_grad():
        assert_accepted(model(x), dense(model, x))
    assert model.last_decision.route == "sdpa"


@pytest.mark.usefixtures("_ahead")
def test_equal_parameters_of_one_element_are_not_the_same():
    config = small(d_model=1, num_heads=1, ffn_dim=1)
    _, model = make_pair(config)
    x = torch.ones(3, 24, 1)
    with torch.no_grad():
        model(x)
        model.final_norm.bias = nn.Parameter(model.final_norm.bias.clone())
        model(x)
        model.final_norm.bias.add_(1.0)
        assert_accepted(model(x), dense(model, x))
        assert (dense(model, x) > 0.5).all()


def test_new_data_at_the_address_of_the_old(model):
    state = model._runtime.state
    state.invalidate()
    version = state.refresh()
    weight = model.layers[0].ffn_in.weight
    with torch.no_grad():
        for _ in range(8):  # each time what the last one freed may be handed out again
            weight.data = weight.data * 1.5
    assert state.refresh() == version + 1


def test_what_ran_ahead_of_an_edit_is_dropped(model, x):
    key, plan = model._runtime.last
    plan.ahead, run, results = True, plan.run, []

    def counted(*arguments):
        results.append(run(*arguments))
        return results[-1]

    plan.run = counted
    with torch.no_grad():
        assert model(x) is results[-1]
        assert model._runtime.last == (key, plan)
        model.final_norm.bias.add_(1.0)
        edited = model(x)
        assert len(results) == 2
        assert edited is not results[-1]
        assert_accepted(edited, dense(model, x))
        model.double()
        with pytest.raises(InputError, match=r"x\.dtype"):
            model(x)


def test_a_call_unlike_the_last_does_not_run_ahead(model, x):
    _, plan = model._runtime.last
    plan.ahead = True

    def refuse(*arguments):
        raise AssertionError("another call's plan ran")

    with torch.no_grad():
        model(x[:2])
        plan.run = refuse
        model(x[:2])
        model.requires_grad_(True)
        with torch.enable_grad():
            model(x)
        with pytest.raises(InputError):
            model(x[..., :-1])
        with pytest.raises(AssertionError, match="another call's plan"):
            model(x)


class Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


def test_nothing_is_computed_to_see_a_change_within_a_capture(model):
    state = model._runtime.state
    version = state.version
    assert state.refresh(capturing=True) == version
    replace_parameter(model)
    with Recording() as recording:
        assert not state._watch.unchanged(capturing=True)
    assert recording.calls == []
    assert state.refresh(capturing=True) == version + 1


def test_a_hook_that_stays_is_looked_at_once(model, x):
    with torch.no_grad():
        hooked(model)
        model(x)
        version = model.last_decision.contract.weights_version
        model(x)
        assert model.last_decision.contract.weights_version == version


def test_function_transforms_after_a_warm_call(model, x):
    model.requires_grad_(False)
    model(x)
    got = torch.func.vmap(model)(x[None].expand(2, -1, -1, -1))
    assert model.last_decision.route == "dense"
    assert_accepted(got[1], dense(model, x))


def test_a_view_with_a_pending_negation(model, x):
    with torch.no_grad():
        negated = torch._neg_view(x)
        assert torch.equal(model(negated), dense(model, negated))
    assert model.last_decision.route == "dense"


def test_forward_mode_tangents_are_carried(model, x):
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.flip(1))
        expected = forward_ad.unpack_dual(dense(model, dual)).tangent
        assert torch.equal(forward_ad.unpack_dual(model(dual)).tangent, expected)
    assert expected.abs().max() > 1e-3


def test_another_launch_or_other_admissions_decide_anew(model, x):
    with torch.no_grad():
        model.route, model.launch = "sdpa", {"packed_qkv": False}
        model(x)
        assert model.last_decision.launch == {"packed_qkv": False}
        model.launch = {"packed_qkv": True}
        model(x)
        assert model.last_decision.launch == {"packed_qkv": True}


def replaced(model, name, parameter):
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, nn.Parameter(parameter.clone()))


def retyped(model, name, parameter):
    model.get_submodule(name.rpartition(".")[0]).double()


def within_inference_mode(model, name, parameter):
    with torch.inference_mode():
        parameter.mul_(1.5)


def swapped(model, name, parameter):
    torch.utils.swap_tensors(parameter, nn.Parameter(parameter.clone()))


EDITS = {
    "in place": lambda m, name, p: p.mul_(1.5),
    "one element": lambda m, name, p: p.view(-1)[-1:].fill_(2.0),
    "in inference mode": within_inference_mode,
    "new data": lambda m, name, p: setattr(p, "data", p.clone()),
    "copied": lambda m, name, p: m.load_state_dict({name: p + 1.0}, strict=False),
    "assigned": lambda m, name, p: m.load_state_dict({name: p + 1.0}, strict=False, assign=True),
    "a new parameter": replaced,
    "swapped": swapped,
    "another dtype": retyped,
}


def looked_over(model):
    """The state of a model that was found unchanged, whichever way it is looked over."""
    state = model._runtime.state
    version = state.refresh()
    assert state.refresh() == version
    return state, version


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_an_edit_of_any_one_parameter_is_seen(model, edit):
    with torch.no_grad():
        for name, parameter in list(model.named_parameters()):
            state, version = looked_over(model)
            edit(model, name, parameter)
            assert state.refresh() == version + 1, name
            model.float()


def forward_patched(module):
    module.forward = lambda *arguments: arguments[0]


def in_a_new_dictionary(module):
    module._forward_pre_hooks = OrderedDict({1: lambda module, arguments: None})


CHANGES = {
    "a hook": lambda module: module.register_forward_hook(lambda *arguments: None),
    "a pre-hook": lambda module: module.register_forward_pre_hook(lambda *arguments: None),
    "a hook in a new dictionary": in_a_new_dictionary,
    "a forward": forward_patched,
    "an attribute": lambda module: setattr(module, "tag", 1),
    "a class": lambda module: setattr(module, "__class__", type("Own", (type(module),), {})),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_any_one_module_is_seen(model, change):
    for name, module in list(model.named_modules())[1:]:
        state, version = looked_over(model)
        change(module)
        assert state.refresh() == version + 1, name
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


def test_a_submodule_replaced_removed_or_put_back_anywhere_is_seen(model):
    for name, module in list(model.named_modules())[1:]:
        path, _, leaf = name.rpartition(".")
        parent = model.get_submodule(path)
        for put in (copy.deepcopy(module), None, module):
            state, version = looked_over(model)
            parent._modules[leaf] = put
            assert state.refresh() == version + 1, name
        state, version = looked_over(model)
        del parent._modules[leaf]
        assert state.refresh() == version + 1, name
        parent._modules[leaf] = module


def test_layers_that_changed_places(model, x):
    with torch.no_grad():
        before = model(x)
        layers = model.layers._modules
        layers["0"], layers["1"] = layers["1"], layers["0"]
        assert_accepted(model(x), dense(model, x))
        assert (model(x) - before).abs().max() > 1e-3


@pytest.mark.parametrize("position", [0, 17, -1])
@pytest.mark.parametrize("how", ["in place", "new data"])
def test_an_edit_while_a_call_runs_is_seen_by_it(model, x, position, how):
    """As by another thread, after the launch and before anything is looked over."""
    _, plan = model._runtime.last
    plan.ahead, run = True, plan.run
    parameter = list(model.parameters())[position]

    def interrupted(*arguments):
        result = run(*arguments)
        if how == "in place":
            parameter.add_(0.5)
        else:
            parameter.data = parameter + 0.5
        return result

    plan.run = interrupted
    with torch.no_grad():
        assert_accepted(model(x), dense(model, x))


def test_what_surrounds_a_warm_call_is_seen(model, x):
    with torch.no_grad():
        plain = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(x), dense(model, x))
            assert model.last_decision.route == "dense"
        torch.use_deterministic_algorithms(True)
        try:
            model(x)
            assert model.last_decision.route == "dense"
        finally:
            torch.use_deterministic_algorithms(False)
        assert torch.equal(model(x), plain)
        assert model.last_decision.route == "sdpa"


class PassingOn(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_edits_are_seen_within_a_function_mode(model, x):
    with torch.no_grad(), PassingOn():
        model(x)
        for parameter in (model.layers[0].norm1.weight, model.final_norm.bias):
            parameter.add_(0.5)
            assert_accepted(model(x), dense(model, x))
            assert model.last_decision.route == "sdpa"


def test_what_is_only_touched_is_not_packed_anew(model, x):
    with torch.no_grad():
        version = model._runtime.state.version
        model.train().eval().requires_grad_(False).to(torch.float32)
        model.final_norm.eps = float(str(model.final_norm.eps))  # equal, and another object
        for module in model.modules():
            module.training = not module.training
        for _ in range(2):
            model(x)
    assert model._runtime.state.version == version

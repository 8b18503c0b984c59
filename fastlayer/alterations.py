"""Whether a model still runs as the reference does: what else its result may follow from.

Accelerated routes read parameters and never call the modules that hold them. So a replaced or
subclassed module, a method patched on an instance or a class, a hook, a setting of its own: each
would be computed otherwise in silence, were it not found here.
"""

from __future__ import annotations

import itertools
from operator import attrgetter, call
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules import module as module_globals

from fastlayer.config import TransformerConfig
from fastlayer.reference import ReferenceAttention, ReferenceBlock, ReferenceTransformer

R = TypeVar("R", bound=nn.Module)

_LAYER_NORM_EPS = 1e-5

#: Instance attributes that a module's forward reads besides parameters and submodules.
SETTINGS: dict[type[nn.Module], tuple[str, ...]] = {
    ReferenceAttention: ("num_heads", "head_dim", "causal"),
    nn.LayerNorm: ("normalized_shape", "eps", "elementwise_affine"),
}

#: Where a module keeps its parameters, submodules and hooks, among others.
PLAIN_STATE = frozenset(vars(nn.Module()))

#: Instance attributes of plain modules, and that of a module that ``compile()`` was called on,
#: which leaves its arithmetic. Any other that shadows one of the class changes what a call runs.
PLAIN_NAMES = frozenset(
    (
        *PLAIN_STATE,
        *itertools.chain.from_iterable(SETTINGS.values()),
        *("in_features", "out_features", "_compiled_call_impl"),
    )
)

_CALLED = ("forward", "__call__", "_wrapped_call_impl", "_call_impl")

#: What a call of the reference looks up in each class of its tree.
METHODS: dict[type[nn.Module], tuple[str, ...]] = {
    ReferenceTransformer: _CALLED,
    nn.ModuleList: (*_CALLED, "__iter__"),
    ReferenceBlock: _CALLED,
    ReferenceAttention: (*_CALLED, "_split_heads"),
    nn.LayerNorm: _CALLED,
    nn.Linear: _CALLED,
}
_METHOD_GETTERS = [attrgetter(*names) for names in METHODS.values()]


def called_methods() -> list[object]:
    return list(map(call, _METHOD_GETTERS, METHODS))


#: The methods as this package found them; one patched before its import counts as plain.
_PLAIN_METHODS = called_methods()


def call_alteration(module: nn.Module, config: TransformerConfig) -> str:
    """Why a call of ``module`` would not run as the plain model's does, or "".

    A class that is no ``ReferenceTransformer`` is taken at its word; only what was done to its
    instances is looked for.
    """
    if isinstance(module, ReferenceTransformer):
        return root_alteration(module) or alteration(module, config)
    return _process_alteration() or instance_alteration(module)


def alteration(module: nn.Module, config: TransformerConfig) -> str:
    """Why ``module`` is not the plain tree that accelerated routes may read, or "".

    A replaced submodule (an adapter, a quantised layer), a parametrization, a hook, a method
    patched on an instance or a class, mixed dtypes or devices, or a setting other than the
    configuration's: all of these change the computation, and the reference arithmetic, which runs
    the modules themselves, honours them. Of the root itself, see ``root_alteration``.
    """
    return (
        _process_alteration() or tree_alteration(module, config) or _odd_parameters(module, config)
    )


def _process_alteration() -> str:
    """Why no module in this process runs as its class was written, or ""."""
    if module_globals._global_forward_hooks or module_globals._global_forward_pre_hooks:
        return "a forward hook is registered for all modules"
    for kind, present, plain in zip(METHODS, called_methods(), _PLAIN_METHODS, strict=True):
        if present != plain:
            return f"a method of the class {kind.__name__} was replaced"
    return ""


def tree_alteration(module: nn.Module, config: TransformerConfig) -> str:
    """Why what lies below ``module`` does not run as the plain modules do, or "".

    What ``alteration`` finds in single modules: their classes, hooks, own methods and settings.
    """
    expected: dict[str, type[nn.Module]] = {"layers": nn.ModuleList, "final_norm": nn.LayerNorm}
    for index in range(config.num_layers):
        block = f"layers.{index}"
        expected[block] = ReferenceBlock
        expected[f"{block}.attention"] = ReferenceAttention
        for name in ("norm1", "norm2"):
            expected[f"{block}.{name}"] = nn.LayerNorm
        for name in ("ffn_in", "ffn_out", *(f"attention.{p}_proj" for p in ("q", "k", "v", "out"))):
            expected[f"{block}.{name}"] = nn.Linear
    settings: dict[type[nn.Module], tuple[object, ...]] = {
        ReferenceAttention: (config.num_heads, config.head_dim, config.causal),
        nn.LayerNorm: ((config.d_model,), _LAYER_NORM_EPS, True),
    }
    found = {name: child for name, child in module.named_modules(remove_duplicate=False) if name}
    for name, kind in expected.items():
        child = found.pop(name, None)
        if type(child) is not kind:
            return f"the module {name} is {type(child).__name__}, not the plain {kind.__name__}"
        if reason := _own_conduct(child, kind):
            return f"the module {name} carries {reason}"
        for setting, value in zip(SETTINGS.get(kind, ()), settings.get(kind, ()), strict=True):
            given = getattr(child, setting, None)
            if given != value:
                return f"the module {name} has {setting} = {given!r}, not {value!r}"
    return f"the module {next(iter(found))} is not part of the model" if found else ""


#: Classes whose own call gives the reference's result, with what such a call looks up in them.
_PLAIN_ROOTS: dict[type[nn.Module], tuple[object, ...]] = {}
_called_by = attrgetter(*_CALLED)


def plain_root(kind: type[R]) -> type[R]:
    """Decorates a class whose ``forward``, as it is now, computes the reference's result."""
    _PLAIN_ROOTS[kind] = _called_by(kind)
    return kind


plain_root(ReferenceTransformer)


def root_alteration(module: nn.Module) -> str:
    """Why a call of ``module`` itself is not that of a ``plain_root``, or "".

    A subclass with a forward of its own, a method patched on the instance, or a hook.
    """
    kind = type(module)
    if _called_by(kind) not in _PLAIN_ROOTS.values():
        return f"the class {kind.__name__} has a forward of its own"
    reason = _own_conduct(module, ReferenceTransformer)
    return f"the model carries {reason}" if reason else ""


def _own_conduct(module: nn.Module, kind: type[nn.Module]) -> str:
    """What makes this one instance run otherwise than its class, or ""."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "a hook"
    shadowing = [own for own in vars(module) if own not in PLAIN_NAMES and hasattr(kind, own)]
    return f"a {shadowing[0]} of its own" if shadowing else ""


def instance_alteration(module: nn.Module) -> str:
    """Why some instance within ``module`` runs otherwise than its class says, or "".

    For trees of any classes: hooks, and a patched forward.
    """
    for name, child in module.named_modules():
        what = f"the module {name}" if name else "the model"
        if child._forward_hooks or child._forward_pre_hooks:
            return f"{what} carries a hook"
        if isinstance(child, torch.jit.ScriptModule):
            continue  # whose instances hold their class's forward
        for own in _CALLED:
            if own in vars(child):
                return f"{what} carries a {own} of its own"
    return ""


def _odd_parameters(module: nn.Module, config: TransformerConfig) -> str:
    """Why the parameters are not those of the plain modules, alike in dtype and device, or ""."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if len(parameters) != 16 * config.num_layers + 2:
        return f"there are {len(parameters)} parameters, not {16 * config.num_layers + 2}"
    first = next(iter(parameters.values()))
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter:
            return f"the parameter {name} is a {type(parameter).__name__}"
        if parameter.dtype != first.dtype or parameter.device != first.device:
            return (
                f"the parameter {name} is {parameter.dtype} on {parameter.device}, others are "
                f"{first.dtype} on {first.device}"
            )
    return ""

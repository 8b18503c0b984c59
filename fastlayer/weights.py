"""What belongs to one model between calls: packed weights, and whether they are still current.

Freshness rests on three facts checked on every call: each parameter is the same object in the same
place of the module tree, at the same address, with the same version counter. Parameters created in
inference mode have no counter; they are compared by value with a snapshot instead. Writes through
``parameter.data`` escape version counters: call ``FastTransformer.refresh()`` after them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import attrgetter, getitem, is_
from typing import TypeVar, cast

import torch
from torch import nn

from fastlayer.config import TransformerConfig
from fastlayer.graphs import GraphCache
from fastlayer.reference import ReferenceAttention, ReferenceBlock

T = TypeVar("T")

_LAYER_NORM_EPS = 1e-5

_version = attrgetter("_version")
_requires_grad = attrgetter("requires_grad")
_forward_hooks = attrgetter("_forward_hooks")
_forward_pre_hooks = attrgetter("_forward_pre_hooks")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The live parameters of one block. Weights ``[out, in]``, biases ``[out]``."""

    norm1: tuple[torch.Tensor, torch.Tensor]
    q: tuple[torch.Tensor, torch.Tensor]
    k: tuple[torch.Tensor, torch.Tensor]
    v: tuple[torch.Tensor, torch.Tensor]
    out: tuple[torch.Tensor, torch.Tensor]
    norm2: tuple[torch.Tensor, torch.Tensor]
    ffn_in: tuple[torch.Tensor, torch.Tensor]
    ffn_out: tuple[torch.Tensor, torch.Tensor]

    def packed_qkv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """New tensors: weight ``[3 d, d]`` and bias ``[3 d]``, q over k over v."""
        weights, biases = zip(self.q, self.k, self.v, strict=True)
        return torch.cat(weights), torch.cat(biases)


class ModelState:
    """Everything a route may keep for one model; all of it is dropped when a parameter changes.

    Attributes:
        module: the ``FastTransformer`` itself.
        config: its shape; the batch and length of a call are in the contract.
        graphs: captured CUDA graphs.
        notes: what a route did otherwise than its launch says (a failed capture, a halved slice);
            the model moves them into ``last_decision``, where they stay.
        measured: what the last call measured; in ``last_decision`` until the next call.
        version: grows by one whenever a parameter was edited, replaced or moved.
        altered: why the module tree is not the plain one, or "".
    """

    def __init__(self, module: nn.Module, config: TransformerConfig) -> None:
        self.module = module
        self.config = config
        self.graphs = GraphCache()
        self.notes: list[str] = []
        self.measured: tuple[str, ...] = ()
        self.version = 0
        self.altered = ""
        self._packs: dict[Hashable, object] = {}
        self._watch: _Watch | None = None

    def refresh(self) -> int:
        """Drops what was derived from the parameters if any of them changed; the version."""
        if self._watch is None or not self._watch.unchanged():
            self.invalidate()
            self._watch = _Watch(self.module)
            self.altered = alteration(self.module, self.config)
        return self.version

    @property
    def requires_grad(self) -> bool:
        """Whether autograd would follow some parameter; not part of the version."""
        return self._watch is not None and self._watch.requires_grad()

    def invalidate(self) -> None:
        """Drops packed weights and graphs unconditionally."""
        self.version += 1
        self._packs.clear()
        self.graphs.clear()
        self._watch = None

    def get(self, key: Hashable, build: Callable[[], T]) -> T:
        """The value ``build`` derived from the present parameters, built once a version.

        ``build`` runs without autograd and outside inference mode.
        """
        if key not in self._packs:
            with torch.inference_mode(False), torch.no_grad():
                self._packs[key] = build()
        return cast(T, self._packs[key])

    @property
    def layers(self) -> list[LayerWeights]:
        """The live parameters of every block (of a module tree that is not altered)."""
        return self.get("layers", lambda: [_layer_weights(layer) for layer in self._blocks()])

    @property
    def final_norm(self) -> tuple[torch.Tensor, torch.Tensor]:
        return _affine(cast(nn.LayerNorm, self.module.final_norm))

    def _blocks(self) -> list[ReferenceBlock]:
        return list(cast("list[ReferenceBlock]", self.module.layers))


class _Watch:
    """A snapshot of identities, addresses and versions over one module tree.

    ``unchanged`` runs on every call, hence its loops in C.
    """

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self._inner = modules[1:]
        slots: list[tuple[dict[str, object], str]] = [
            (cast("dict[str, object]", entries), name)
            for module in modules
            for entries in (module._modules, module._parameters)
            for name in entries
        ]
        self._entries = [entries for entries, _ in slots]
        self._names = [name for _, name in slots]
        self._objects = [entries[name] for entries, name in slots]
        self._children = [
            module._modules for module in modules if isinstance(module, nn.ModuleList)
        ]
        self._child_counts = list(map(len, self._children))
        self._tensors = [item for item in self._objects if isinstance(item, torch.Tensor)]
        self._pointers = list(map(torch.Tensor.data_ptr, self._tensors))
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._versions = list(map(_version, self._counted))
        self._snapshots = [
            (tensor, tensor.detach().clone()) for tensor in self._tensors if tensor.is_inference()
        ]

    def unchanged(self) -> bool:
        try:
            present = map(getitem, self._entries, self._names)
            if not all(map(is_, present, self._objects)):
                return False
            if list(map(_version, self._counted)) != self._versions:
                return False
        except KeyError:  # a name is gone
            return False
        except RuntimeError:  # data made in inference mode, which has no counter, was swapped in
            return False
        if list(map(torch.Tensor.data_ptr, self._tensors)) != self._pointers:
            return False
        if list(map(len, self._children)) != self._child_counts:
            return False
        if any(map(_forward_pre_hooks, self._inner)) or any(map(_forward_hooks, self._inner)):
            return False
        if self._snapshots and _capturing():
            return (
                True  # comparing would break the caller's capture, within which nothing is packed
            )
        return all(torch.equal(tensor, snapshot) for tensor, snapshot in self._snapshots)

    def requires_grad(self) -> bool:
        return any(map(_requires_grad, self._tensors))


def alteration(module: nn.Module, config: TransformerConfig) -> str:
    """Why ``module`` is not the plain tree that accelerated routes may read, or "".

    A replaced submodule (an adapter, a quantised layer), a parametrization, a hook, an own
    ``forward``, mixed dtypes or devices, or an own epsilon: all of these change the computation,
    and the reference arithmetic, which runs the modules themselves, honours them.
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
    found = {name: child for name, child in module.named_modules(remove_duplicate=False) if name}
    for name, kind in expected.items():
        child = found.pop(name, None)
        if type(child) is not kind:
            return f"the module {name} is {type(child).__name__}, not the plain {kind.__name__}"
        if child._forward_hooks or child._forward_pre_hooks or "forward" in child.__dict__:
            return f"the module {name} carries a hook or a forward of its own"
        if isinstance(child, nn.LayerNorm) and child.eps != _LAYER_NORM_EPS:
            return f"the module {name} has eps = {child.eps}, not {_LAYER_NORM_EPS}"
    if found:
        return f"the module {next(iter(found))} is not part of the model"
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


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _affine(module: nn.Linear | nn.LayerNorm) -> tuple[torch.Tensor, torch.Tensor]:
    return module.weight.detach(), module.bias.detach()


def _layer_weights(block: ReferenceBlock) -> LayerWeights:
    attention = block.attention
    return LayerWeights(
        norm1=_affine(block.norm1),
        q=_affine(attention.q_proj),
        k=_affine(attention.k_proj),
        v=_affine(attention.v_proj),
        out=_affine(attention.out_proj),
        norm2=_affine(block.norm2),
        ffn_in=_affine(block.ffn_in),
        ffn_out=_affine(block.ffn_out),
    )

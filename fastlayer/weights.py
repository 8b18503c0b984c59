"""What belongs to one model between calls: packed weights, and whether they are still current.

Freshness is checked on every call. Of the parameters: each is the same object in the same place of
the module tree, at the same address, with the same version counter. Parameters created in inference
mode have no counter; they are compared by value with a snapshot instead. Writes through
``parameter.data`` escape version counters: call ``FastTransformer.refresh()`` after them. Data that
was replaced stays allocated until the next call looks, lest other data come to lie there. Of the
modules: the same objects of the same classes, whose methods, settings (heads, causality, epsilon),
own attributes and hooks are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import TypeVar, cast

import torch
from torch import nn
from torch.nn.modules import module as module_globals

from fastlayer.alterations import PLAIN_NAMES, PLAIN_STATE, SETTINGS, alteration, called_methods
from fastlayer.config import TransformerConfig
from fastlayer.graphs import GraphCache
from fastlayer.reference import ReferenceAttention, ReferenceBlock

T = TypeVar("T")

_address = torch.Tensor.data_ptr
_version = attrgetter("_version")
_requires_grad = attrgetter("requires_grad")
_modules = itemgetter("_modules")
_parameters = itemgetter("_parameters")
_forward_hooks = itemgetter("_forward_hooks")
_forward_pre_hooks = itemgetter("_forward_pre_hooks")
_attention_settings = itemgetter(*SETTINGS[ReferenceAttention])
_norm_settings = itemgetter(*SETTINGS[nn.LayerNorm])


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
    """Everything a route may keep for one model; all of it is dropped when the model changes.

    Attributes:
        module: the ``FastTransformer`` itself.
        config: its shape; the batch and length of a call are in the contract.
        graphs: captured CUDA graphs.
        notes: what a route did otherwise than its launch says (a failed capture, a halved slice);
            the model moves them into ``last_decision``, where they stay.
        measured: what the last call measured; in ``last_decision`` until the next call.
        version: grows by one whenever a parameter was edited, replaced or moved, or the module
            tree changed otherwise.
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

    def refresh(self, capturing: bool = False) -> int:
        """Drops what was derived from the module tree if anything in it changed; the version.

        ``capturing``: a CUDA graph of the caller's is being captured.
        """
        watch = self._watch
        if watch is None or not watch.unchanged(capturing):
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
    """A snapshot of everything in one module tree that its result follows from.

    ``unchanged`` runs on every call, hence its loops in C over lists collected once. The instance
    dictionaries of the modules stay the same objects; what they hold is read anew each time, so
    that a whole dictionary of parameters or hooks put in another's place is noticed as well.
    """

    def __init__(self, root: nn.Module) -> None:
        modules = [module for module in root.modules() if vars(module).keys() >= PLAIN_STATE]
        # A scripted module keeps its state elsewhere: a tree with one is looked at anew each time.
        self._opaque = len(modules) < len(list(root.modules()))
        self._inner = modules[1:]  # hooks and a forward of the root's run before this is asked
        self._classes = list(map(type, self._inner))
        self._attributes = [vars(module) for module in self._inner]
        self._attribute_count = sum(map(len, self._attributes))
        # Modules with other names than plain ones, which could give one up for a forward.
        self._tagged = [own for own in self._attributes if not own.keys() <= PLAIN_NAMES]
        self._tags = list(map(tuple, self._tagged))
        self._parents = [vars(module) for module in modules if module._modules]
        self._owners = [vars(module) for module in modules if module._parameters]
        self._held_modules = list(map(dict, map(_modules, self._parents)))
        self._held_parameters = list(map(dict, map(_parameters, self._owners)))
        self._attentions = _with_settings(modules, ReferenceAttention)
        self._norms = _with_settings(modules, nn.LayerNorm)
        self._attention_settings = list(map(_attention_settings, self._attentions))
        self._norm_settings = list(map(_norm_settings, self._norms))
        self._hooked = self._has_hooks()
        self._methods = called_methods()
        held = [item for entries in self._held_parameters for item in entries.values()]
        self._tensors = [item for item in held if isinstance(item, torch.Tensor)]
        self._single = any(tensor.numel() == 1 for tensor in self._tensors)
        # Held, so that no other data can come to lie at their addresses.
        self._storages = list(map(_storage, self._tensors))
        self._addresses = list(map(_address, self._tensors))
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._version = sum(map(_version, self._counted))  # of counters that only ever grow
        self._snapshots = [
            (tensor, tensor.detach().clone()) for tensor in self._tensors if tensor.is_inference()
        ]

    def _has_hooks(self) -> bool:
        return bool(
            any(map(_forward_hooks, self._attributes))
            or any(map(_forward_pre_hooks, self._attributes))
            or module_globals._global_forward_hooks
            or module_globals._global_forward_pre_hooks
        )

    def unchanged(self, capturing: bool) -> bool:
        if self._opaque:
            return False
        try:
            if (capturing or self._single) and not self._same_objects():
                return False
            # Equality asks the objects themselves only where they are not the same ones. Tensors
            # then raise, or answer for their one element: the case left to ``_same_objects``, as
            # is a capture, which their comparison would become a part of.
            if (
                list(map(_parameters, self._owners)) != self._held_parameters
                or list(map(_modules, self._parents)) != self._held_modules
                or sum(map(_version, self._counted)) != self._version
                or list(map(_address, self._tensors)) != self._addresses
                or list(map(_attention_settings, self._attentions)) != self._attention_settings
                or list(map(_norm_settings, self._norms)) != self._norm_settings
            ):
                return False
        except Exception:
            # A name is gone; tensors that are not the same would not compare; or data made in
            # inference mode, which has no counter, was swapped in.
            return False
        if (
            list(map(type, self._inner)) != self._classes
            or sum(map(len, self._attributes)) != self._attribute_count
            or (self._tagged and list(map(tuple, self._tagged)) != self._tags)
            or called_methods() != self._methods
            or self._has_hooks() is not self._hooked
        ):
            return False
        if not self._snapshots or capturing:
            return True  # comparing would break a capture, within which nothing is packed
        return all(torch.equal(tensor, snapshot) for tensor, snapshot in self._snapshots)

    def _same_objects(self) -> bool:
        present = [*map(_parameters, self._owners), *map(_modules, self._parents)]
        held = [*self._held_parameters, *self._held_modules]
        return list(map(len, present)) == list(map(len, held)) and all(
            entries[name] is item
            for entries, mine in zip(present, held, strict=True)
            for name, item in mine.items()
        )

    def requires_grad(self) -> bool:
        return any(map(_requires_grad, self._tensors))


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # one that wraps others has none of its own
        return None


def _with_settings(modules: list[nn.Module], kind: type[nn.Module]) -> list[dict[str, object]]:
    """Instance dictionaries of the plain modules of that class; any other is an alteration."""
    names = set(SETTINGS[kind])
    return [vars(m) for m in modules if type(m) is kind and vars(m).keys() >= names]


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

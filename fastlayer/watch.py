"""Whether a module tree is as it was: what a model asks on every call.

Of the parameters: each is the same object in the same place of the module tree, at the same
address, with the same version counter. Parameters created in inference mode have no counter; they
are compared by value with a snapshot instead. Writes through ``parameter.data`` escape version
counters: call ``FastTransformer.refresh()`` after them. So do fused optimizers, whose steps are
counted instead. Data that was replaced stays allocated
until the next call looks, lest other data come to lie there. Of the modules: the same objects of
the same classes, whose methods, settings (heads, causality, epsilon), own attributes and hooks are
as they were.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as module_globals
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastlayer.alterations import METHODS, PLAIN_STATE, SETTINGS, called_methods
from fastlayer.reference import ReferenceAttention

_address = torch.Tensor.data_ptr
_version = attrgetter("_version")
_requires_grad = attrgetter("requires_grad")
_modules = itemgetter("_modules")
_parameters = itemgetter("_parameters")
_forward_hooks = itemgetter("_forward_hooks")
_forward_pre_hooks = itemgetter("_forward_pre_hooks")
_attention_settings = itemgetter(*SETTINGS[ReferenceAttention])
_norm_settings = itemgetter(*SETTINGS[nn.LayerNorm])

#: Dictionaries of a module whose entries matter, by its attributes; and those for all modules.
_HOLDERS = ("_parameters", "_modules", "_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")

#: Attributes of a module whose values matter; of the others, that there is no more and no less.
_TELLING = frozenset((*_HOLDERS, *(name for names in SETTINGS.values() for name in names)))


#: Steps of fused optimizers in this process. Their kernels write to parameters without a count.
_fused_steps = 0


def _count_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if any(group.get("fused") for group in optimizer.param_groups):
        global _fused_steps
        _fused_steps += 1


register_optimizer_step_post_hook(_count_step)


class Prover(Protocol):
    """What proves facts by identity, quicker than Python: ``fastlayer.kernels.unchanged``.

    Facts are ``[classes, entries, attributes, tensors, 0]``, the first four flat tuples:
    ``(object, class, ...)``; ``(dictionary, (key, value, ...), ...)``, complete and in order, with
    ``WHATEVER`` for a value that does not matter; ``(object, name, value, ...)``; and
    ``(tensor, version, address, ...)``.
    """

    WHATEVER: object

    def watch(self, facts: list[Any], /) -> None:
        """To be called once before ``unchanged``."""

    def unchanged(self, facts: list[Any], /) -> bool:
        """Whether all of them hold. One that does not may have been replaced by its equal."""


class Watch:
    """A snapshot of everything in one module tree that its result follows from.

    ``unchanged`` runs on every call. A prover, where there is one, answers for nearly all of them;
    what it cannot prove is compared, in loops in C over lists collected once. The instance
    dictionaries of the modules stay the same objects; what they hold is read anew each time, so
    that a whole dictionary of parameters or hooks put in another's place is noticed as well.
    """

    def __init__(self, root: nn.Module, prover: Prover | None = None) -> None:
        self.prover = prover
        self._steps = _fused_steps
        self._facts: list[Any] = []
        modules = [module for module in root.modules() if vars(module).keys() >= PLAIN_STATE]
        # A scripted module keeps its state elsewhere: a tree with one is looked at anew each time.
        self._opaque = len(modules) < len(list(root.modules()))
        self._root = vars(root)
        self._inner = modules[1:]  # hooks and a forward of the root's run before this is asked
        self._classes = list(map(type, self._inner))
        self._attributes = [vars(module) for module in self._inner]
        # Of every one, for any may be given up for a forward.
        self._names = list(map(tuple, self._attributes))
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

    def unchanged(self, capturing: bool) -> bool:
        """Whether everything is as it was; ``capturing`` while the caller captures a CUDA graph."""
        if self._steps != _fused_steps:
            return False
        prover = self.prover
        if prover is None or self._opaque or self._snapshots:
            return self._compare(capturing)
        try:
            if self._facts and prover.unchanged(self._facts):
                return True
        except Exception:
            pass  # A name is gone, or data made in inference mode was swapped in.
        if not self._compare(capturing):
            return False
        facts = self._collect(prover)
        # Once more, for another thread may have changed something before it was collected.
        if not self._compare(capturing):
            return False
        self._facts = facts
        return True

    @property
    def is_proved(self) -> bool:
        return self.prover is not None and bool(self._facts)

    def _collect(self, prover: Prover) -> list[Any]:
        """Everything as it is now, for ``prover``."""
        entries: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        for own in (self._root, *self._attributes):
            told = {name: v if name in _TELLING else prover.WHATEVER for name, v in own.items()}
            entries.append((own, tuple(chain.from_iterable(told.items()))))
        holders = [own[name] for own in self._attributes for name in _HOLDERS]
        holders += [self._root["_parameters"], self._root["_modules"]]
        holders += [getattr(module_globals, name) for name in _GLOBAL_HOOKS]
        entries += [(held, tuple(chain.from_iterable(held.items()))) for held in holders]
        looked_up: list[tuple[object, str]] = [(module_globals, name) for name in _GLOBAL_HOOKS]
        looked_up += [(kind, name) for kind, names in METHODS.items() for name in names]
        facts = [
            tuple(chain.from_iterable(zip(self._inner, self._classes, strict=True))),
            tuple(chain.from_iterable(entries)),
            tuple(chain.from_iterable((of, name, getattr(of, name)) for of, name in looked_up)),
            tuple(chain.from_iterable((t, t._version, t.data_ptr()) for t in self._tensors)),
            0,
        ]
        prover.watch(facts)
        return facts

    def _compare(self, capturing: bool) -> bool:
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
            or list(map(tuple, self._attributes)) != self._names
            or called_methods() != self._methods
            or self._has_hooks() is not self._hooked
        ):
            return False
        if not self._snapshots or capturing:
            return True  # comparing would break a capture, within which nothing is packed
        return all(torch.equal(tensor, snapshot) for tensor, snapshot in self._snapshots)

    def _has_hooks(self) -> bool:
        return bool(
            any(map(_forward_hooks, self._attributes))
            or any(map(_forward_pre_hooks, self._attributes))
            or module_globals._global_forward_hooks
            or module_globals._global_forward_pre_hooks
        )

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

"""FastTransformer: the reference's module with a forward that decides how to compute."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Self

import torch
from torch import nn
from torch.autograd import forward_ad

from fastlayer import admissions as admissions_module
from fastlayer.admissions import Admissions
from fastlayer.alterations import (
    instance_alteration,
    plain_root,
    root_alteration,
    tree_alteration,
)
from fastlayer.ambient import Ambient, ambient
from fastlayer.arguments import check_dense, check_input, check_mask, is_lazy, unusual
from fastlayer.config import SIZE_RULE, TransformerConfig, as_size
from fastlayer.contract import GIB, Precision, RuntimeContract
from fastlayer.device import free_bytes, probe
from fastlayer.dispatch import POLICIES, REFERENCE_ROUTE, Decision, Policy, decide
from fastlayer.errors import ConfigError, InputError, RouteRefused
from fastlayer.masks import MaskClassifier, MaskKind
from fastlayer.reference import ReferenceTransformer
from fastlayer.routes import ROUTE_NAMES, Bound, Launch, route_named
from fastlayer.weights import ModelState

#: Decisions remembered by one model, least recently used out.
_PLANS = 64

#: Free memory enters a contract only where dense arithmetic would take more than this share of the
#: device, and then in steps of ``_MEMORY_STEPS`` to the whole, so that decisions do not flicker.
_MEMORY_SHARE = 8
_MEMORY_STEPS = 16

#: Stands for the memory of a device that fastlayer has no facts about.
_UNKNOWN_MEMORY = 2**62

_ROUTES = f"one of {', '.join(ROUTE_NAMES)}"


@plain_root
class FastTransformer(ReferenceTransformer):
    """A drop-in for ``ReferenceTransformer``: same parameters, same result, chosen arithmetic.

    Args:
        config: a ``TransformerConfig`` or any object with its attributes.
        policy: "strict" runs a faster route only where an admission's evidence covers the device,
            the precision and the case; "eligible" takes the first route without objection.
        route: name of a route to use always; a call it cannot serve raises ``RouteError``.
        launch: launch configuration for ``route``; its default where None.
        admissions: rows to use instead of those committed with the package.
        working_set_bytes: bound on a streamed route's memory above input and output.

    Raises:
        ConfigError: the configuration or an option breaks its rule, or there is no such route.
    """

    def __init__(
        self,
        config: Any,
        *,
        policy: Policy = "strict",
        route: str | None = None,
        launch: Launch | None = None,
        admissions: Admissions | None = None,
        working_set_bytes: int = 2 * GIB,
    ) -> None:
        shape = TransformerConfig.of(config)
        working_set = as_size(working_set_bytes)
        for name, value, holds, rule in (
            ("policy", policy, policy in POLICIES, f"it must be one of {', '.join(POLICIES)}"),
            ("route", route, route in (None, *ROUTE_NAMES), f"it must be None or {_ROUTES}"),
            ("launch", launch, isinstance(launch, Mapping | None), "it must be None or a mapping"),
            ("launch", launch, launch is None or route is not None, "it needs a route to apply to"),
            (
                "admissions",
                admissions,
                isinstance(admissions, Admissions | None),
                "it must be None or Admissions, such as Admissions.load(path)",
            ),
            ("working_set_bytes", working_set_bytes, working_set is not None, SIZE_RULE),
        ):
            if not holds:
                raise ConfigError(name, value, rule, owner="FastTransformer")
        assert working_set is not None
        super().__init__(shape)
        self.config = config  # as given; the modules were made of its sizes as plain integers
        self.policy: Policy = policy
        self.route = route
        self.launch = launch
        self.admissions = admissions
        self.working_set_bytes = working_set
        self._shape = shape
        self._install()

    def _install(self) -> None:
        """What belongs to this very object and is neither copied nor pickled."""
        self._runtime = _Runtime(self)
        self._handle = next(_HANDLES)
        _BY_HANDLE[self._handle] = self

    @classmethod
    def from_reference(cls, reference: nn.Module, *, config: object = None, **options: Any) -> Self:
        """A model that shares the very parameters of ``reference``: an edit shows in both.

        ``reference`` is any module with the reference's parameter names; ``config`` defaults to its
        attribute of that name, and ``options`` are the constructor's. Parameters are all that is
        shared. A class of another kind is taken at its word that it computes the reference's
        result; a ``ReferenceTransformer`` that would compute another one is refused, and so are
        hooks and patched forwards of any.

        Raises:
            InputError: there is no config, names or shapes of parameters differ, or the reference
                has a forward, a hook, a submodule or a setting of its own.
        """
        shape = getattr(reference, "config", None) if config is None else config
        if shape is None:
            raise InputError(
                "from_reference",
                f"a {type(reference).__name__} without a config attribute",
                "the shape of the model",
                "Pass config=.",
            )
        with torch.device("meta"):
            model = cls(shape, **options)
        theirs = dict(reference.named_parameters(remove_duplicate=False))
        ours = dict(model.named_parameters())
        missing, unexpected = sorted(ours.keys() - theirs), sorted(theirs.keys() - ours)
        if missing or unexpected:
            raise InputError(
                "from_reference",
                f"parameters that lack {missing[:4]} and add {unexpected[:4]}",
                "the reference's parameter names",
                "Rename them, or exchange weights through load_state_dict.",
            )
        for name, parameter in theirs.items():
            if parameter.shape != ours[name].shape:
                raise InputError(
                    f"from_reference: {name}",
                    f"shape {tuple(parameter.shape)}",
                    f"{tuple(ours[name].shape)}",
                    "Check that config describes this module.",
                )
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, parameter)
        if isinstance(reference, ReferenceTransformer):
            reason = root_alteration(reference) or tree_alteration(reference, model._shape)
        else:
            reason = instance_alteration(reference)
        if reason:
            raise InputError(
                "from_reference",
                f"an altered model: {reason}",
                "one that runs as its class says, for only parameters are shared",
                "Undo the alteration, or alter the result of from_reference, which honours it.",
            )
        return model.train(reference.training)

    @property
    def last_decision(self) -> Decision | None:
        """What the last call ran and why; None before the first."""
        return self._own_runtime().decision

    def forward(
        self, x: torch.Tensor, valid_token_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The reference's result for ``x [B, N, d_model]`` and a bool mask ``[B, N]`` or None.

        Raises:
            InputError: an argument is no dense tensor, or its rank, width, dtype, shape or device
                does not fit.
            RouteError: an explicit route objects to the call.
            UnsafeFallbackError: no faster route may run and dense would not fit the memory.
        """
        check_dense(x)
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
                return self._outside_the_trace(x, valid_token_mask)
            traced: torch.Tensor = _forward_op(x, valid_token_mask, self._handle)
            return traced
        return self._call(x, valid_token_mask, compiling=False)

    def explain(self, x: torch.Tensor, valid_token_mask: torch.Tensor | None = None) -> str:
        """How this call would be computed, and why, as text to print. Runs nothing."""
        check_dense(x)
        runtime = self._own_runtime()
        runtime.state.refresh(ambient(x)[-1])
        kind = self._mask_kind(x, valid_token_mask, runtime)
        return self._decide(self._contract(x, kind, compiling=False)).explain()

    def refresh(self) -> None:
        """Forgets packed weights and graphs, after writes that version counters cannot see.

        Ordinary edits, optimizers' steps, ``load_state_dict``, ``.to()`` and replaced parameters
        are noticed without this. Writes through ``parameter.data`` are not, nor is another tensor
        assigned to it at the same address (``p.data = p.data.t()``, a second
        ``vector_to_parameters`` of one vector), nor what collectives of ``torch.distributed``
        write, nor a module's whole ``__dict__`` put in the place of its own.
        """
        self._own_runtime().state.invalidate()

    def _outside_the_trace(
        self, x: torch.Tensor, valid_token_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The call as a graph break: an operator could neither be differentiated nor autocast.

        Dynamo skips this frame by the attribute set below; decorating with
        ``torch.compiler.disable`` instead would import Dynamo, and Triton with it, at import.
        """
        call = torch.compiler.disable(self._call)
        result: torch.Tensor = call(x, valid_token_mask, compiling=True)
        return result

    _outside_the_trace._torchdynamo_disable = True  # type: ignore[attr-defined]

    def _call(
        self, x: torch.Tensor, valid_token_mask: torch.Tensor | None, compiling: bool
    ) -> torch.Tensor:
        runtime = self._own_runtime()
        state = runtime.state
        around = ambient(x)
        kind = MaskKind.NONE
        if valid_token_mask is not None:
            kind = self._mask_kind(x, valid_token_mask, runtime)
        mask = None if kind is MaskKind.NONE or not kind.masks else valid_token_mask
        launch, admissions = self.launch, self.admissions
        if launch is not runtime.launch or admissions is not runtime.admissions:
            runtime.choose_by(launch, admissions)
        result: torch.Tensor | None = None
        version = state.version
        key = _key(version, x, kind, around, _options(self), compiling, state)
        last, plan = runtime.last
        if key != last:
            plan = None
        elif plan is not None and plan.ahead:
            result = plan.run(x, mask)
        if state.refresh(around[-1]) != version:
            plan = result = None
            key = _key(state.version, x, kind, around, _options(self), compiling, state)
        if plan is None:
            plan = self._planned(key, x, kind, compiling, runtime)
        if result is None:
            result = plan.run(x, mask)
        if state.notes or state.measured:
            plan.notes += tuple(state.notes)
            plan.decision = replace(plan.decision, notes=plan.notes + state.measured)
            state.notes.clear()
            state.measured = ()
        runtime.decision = plan.decision
        return result

    def _planned(
        self, key: Hashable, x: torch.Tensor, kind: MaskKind, compiling: bool, runtime: _Runtime
    ) -> _Plan:
        """The plan for a call that is not like the last one: remembered, or made now."""
        bound = key in runtime.memory_bound
        plan = runtime.plans.get((key, _available(x.device)) if bound else key)
        if plan is None:
            plan = self._plan(key, x, kind, compiling, runtime)
        if key not in runtime.memory_bound:
            runtime.last = (key, plan)
        return plan

    def _plan(
        self, key: Hashable, x: torch.Tensor, kind: MaskKind, compiling: bool, runtime: _Runtime
    ) -> _Plan:
        contract = self._contract(x, kind, compiling)
        try:
            plan = self._bound(self._decide(contract), runtime)
        except RouteRefused:
            # The route objects from now on, so this decides otherwise or says why it cannot.
            plan = self._bound(self._decide(contract), runtime)
        free = contract.available_bytes if _is_memory_bound(contract) else None
        runtime.remember(key, plan, free)
        return plan

    @staticmethod
    def _bound(decision: Decision, runtime: _Runtime) -> _Plan:
        route = route_named(decision.route)
        assert route is not None
        run = route.bind(runtime.state, decision.contract, decision.launch)
        if decision.contract.device.type == "cuda" and decision.route != REFERENCE_ROUTE:
            from fastlayer.kernels.unchanged import compiled

            runtime.state.prove_by(compiled())
        return _Plan(decision, run, ahead=getattr(run, "reads_copies", False))

    def _decide(self, contract: RuntimeContract) -> Decision:
        rows = admissions_module.committed() if self.admissions is None else self.admissions
        return decide(contract, rows, self.policy, self.route, self.launch)

    def _contract(self, x: torch.Tensor, kind: MaskKind, compiling: bool) -> RuntimeContract:
        dtype = check_input(x, self._shape.d_model)
        batch, tokens, _ = x.shape
        state = self._own_runtime().state
        altered = state.altered or unusual(x)
        inference, autocast, matmul, tf32, deterministic, capturing = ambient(x)
        parameter = self.final_norm.weight
        if not altered and not autocast and parameter.dtype != x.dtype:
            raise InputError(
                "x.dtype",
                f"{x.dtype}",
                f"{parameter.dtype}, as the parameters",
                "Convert the input, or the model with .to(dtype).",
            )
        if not altered and parameter.device != x.device:
            raise InputError(
                "x.device",
                f"{x.device}",
                f"{parameter.device}, where the parameters are",
                "Move the input, or the model with .to(device).",
            )
        device = probe(x.device)
        contract = RuntimeContract(
            config=replace(self._shape, batch_size=max(1, batch), seq_len=max(1, tokens)),
            device=device,
            dtype=dtype,
            mask=kind,
            precision=Precision(matmul, tf32),
            grad=_records_grad(x, state),
            inference=inference,
            training=self.training,
            autocast=autocast,
            deterministic=deterministic,
            compiling=compiling,
            capturing=capturing,
            weights_version=state.version,
            altered=altered,
            available_bytes=device.memory_bytes or _UNKNOWN_MEMORY,
            working_set_bytes=self.working_set_bytes,
        )
        if _is_memory_bound(contract) and not capturing:
            return replace(contract, available_bytes=_available(x.device))
        return contract

    def _mask_kind(self, x: torch.Tensor, mask: torch.Tensor | None, runtime: _Runtime) -> MaskKind:
        if mask is None:
            return MaskKind.NONE
        check_mask(mask, x)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            # Reading the mask would break the caller's capture, and its values may differ at
            # replay: the kind that serves every mask is the only safe one.
            return MaskKind.IRREGULAR
        return runtime.classify(mask)

    def _own_runtime(self) -> _Runtime:
        """This object's runtime; a replica that was made by copying ``__dict__`` gets its own."""
        runtime = self._runtime
        if runtime.state.module is not self:
            self._install()
            runtime = self._runtime
        return runtime

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_runtime"], state["_handle"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._install()


#: Models by the number that stands for them in a traced program, which can hold no module.
_BY_HANDLE: weakref.WeakValueDictionary[int, FastTransformer] = weakref.WeakValueDictionary()
_HANDLES = itertools.count(1)


@torch.library.custom_op("fastlayer::forward", mutates_args=())
def _forward_op(
    x: torch.Tensor, valid_token_mask: torch.Tensor | None, handle: int
) -> torch.Tensor:
    """One model's forward, opaque to Dynamo and Inductor, decided on at run time as ever."""
    result = _BY_HANDLE[handle]._call(x, valid_token_mask, compiling=True)
    return result.contiguous()


@_forward_op.register_fake
def _forward_fake(
    x: torch.Tensor, valid_token_mask: torch.Tensor | None, handle: int
) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@dataclass(slots=True)
class _Plan:
    """How calls of one kind run.

    ``ahead``: ``run`` reads copies of the parameters and writes a new output only, on a device that
    computes while the host goes on. A warm call then launches first and looks the parameters over
    meanwhile; should anything have changed, that result is dropped and the call decided anew.
    """

    decision: Decision
    run: Bound
    ahead: bool = False
    notes: tuple[str, ...] = ()


class _Runtime:
    """What a model remembers between calls; neither copied nor pickled with it."""

    def __init__(self, module: FastTransformer) -> None:
        self.state = ModelState(module, module._shape)
        self.classify = MaskClassifier()
        self.plans: OrderedDict[Hashable, _Plan] = OrderedDict()
        self.memory_bound: set[Hashable] = set()
        self.decision: Decision | None = None
        #: The last call's key with its plan, unless free memory takes part in that decision.
        #: Most calls are like the one before, and comparing keys is quicker than hashing one.
        self.last: tuple[Hashable, _Plan | None] = (None, None)
        self._version = 0
        self.launch: Launch | None = None
        self.admissions: Admissions | None = None

    def choose_by(self, launch: Launch | None, admissions: Admissions | None) -> None:
        """Forgets the plans that were made by another launch or other admissions."""
        self.launch, self.admissions = launch, admissions
        self._forget()

    def _forget(self) -> None:
        self.last = (None, None)
        self.plans.clear()
        self.memory_bound.clear()

    def remember(self, key: Hashable, plan: _Plan, free: int | None) -> None:
        """Keeps ``plan`` for calls with that key while as many bytes are free, if that matters."""
        if self.state.version != self._version:
            self._version = self.state.version
            self._forget()
        if free is not None:
            self.memory_bound.add(key)
            key = (key, free)
        self.plans[key] = plan
        while len(self.plans) > _PLANS:
            self.plans.popitem(last=False)


_options = attrgetter("training", "policy", "route", "working_set_bytes")


def _key(
    version: int,
    x: torch.Tensor,
    kind: MaskKind,
    around: Ambient,
    options: tuple[object, ...],
    compiling: bool,
    state: ModelState,
) -> Hashable:
    """Everything that a decision follows from, but for the free memory."""
    return (
        version,
        x.shape,
        x.dtype,
        x.device,
        type(x),
        is_lazy(x),
        kind,
        _records_grad(x, state),
        around,
        options,
        compiling,
    )


def _records_grad(x: torch.Tensor, state: ModelState) -> bool:
    """Whether autograd would record a call with ``x``, or carry tangents through it."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and (x.requires_grad or state.requires_grad)


def _is_memory_bound(contract: RuntimeContract) -> bool:
    memory = contract.device.memory_bytes
    return bool(memory) and contract.dense_bytes * _MEMORY_SHARE > memory


def _available(device: torch.device) -> int:
    """Free bytes, rounded down to a fraction of the device's memory."""
    step = max(1, probe(device).memory_bytes // _MEMORY_STEPS)
    return free_bytes(device) // step * step

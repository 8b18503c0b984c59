"""What a route is: a name, its objections to a call, its launches, and a way to run.

A route holds no per-model state: it is one object for the process. What belongs to a model
(packed weights, graphs, workspaces) lives in the ``ModelState`` handed to ``bind``, which drops it
whenever a parameter changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from fastlayer.contract import RuntimeContract

if TYPE_CHECKING:
    from fastlayer.weights import ModelState

#: A launch configuration: plain JSON data, e.g. ``{"packed_qkv": True, "execution": "graph"}``.
Launch = Mapping[str, bool | int | float | str | None]

#: ``(x [B, N, d], mask [B, N] | None) -> [B, N, d]``, for exactly one contract and launch. The mask
#: is None unless the contract's mask kind is right_padded or irregular; x may be non-contiguous.
#: The result is a fresh tensor that no later call overwrites.
Bound = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


@runtime_checkable
class Route(Protocol):
    """One way to compute the model.

    ``objections`` and ``launches`` are pure: no tensors, no device, so that they are tested with
    fake devices. ``objections`` returns reasons, complete sentences without a full stop, and an
    empty list where the route can serve the call. ``launches`` lists the configurations worth
    measuring on an eligible call, the default first. ``bind`` does the work that a warm call
    should not repeat; it is called again whenever the contract, the launch or a weight changes.
    What is derived from the weights goes through ``state.get(key, build)``, which keeps it until a
    weight changes; a body to be captured goes through ``state.graphs.bind(body, note)``. Where
    running departs from the launch, ``state.notes`` says so in ``last_decision``. Under
    ``contract.capturing`` the caller captures a CUDA graph: nothing may synchronise, be captured,
    or be packed.
    """

    @property
    def name(self) -> str: ...

    def objections(self, contract: RuntimeContract) -> list[str]: ...

    def launches(self, contract: RuntimeContract) -> list[Launch]: ...

    def bind(self, state: ModelState, contract: RuntimeContract, launch: Launch) -> Bound: ...


def common_objections(contract: RuntimeContract) -> list[str]:
    """Reasons for which nothing but the reference arithmetic serves a call.

    Every accelerated route begins its own objections with these.
    """
    checks: list[tuple[bool, str]] = [
        (
            contract.dtype != "float32",
            f"the input is {contract.dtype}; accelerated routes hold a float32 interface, and the "
            "reference rounds probabilities to the model's dtype",
        ),
        (contract.grad, "autograd would record this call and the route is inference-only"),
        (bool(contract.autocast), f"autocast to {contract.autocast} is active"),
        (contract.deterministic, "deterministic algorithms are requested"),
        (bool(contract.altered), contract.altered),
        (
            contract.device.type not in ("cpu", "cuda"),
            f"device type {contract.device.type!r} is not one of cpu, cuda",
        ),
    ]
    return [reason for applies, reason in checks if applies]


def check_launch(name: str, launch: Launch, known: Mapping[str, tuple[object, ...]]) -> None:
    """Raises ``ValueError`` if ``launch`` holds an unknown option or an unknown value of one."""
    for key, value in launch.items():
        if key not in known:
            raise ValueError(f"route {name!r} has no launch option {key!r}; it has {sorted(known)}")
        if known[key] and value not in known[key]:
            raise ValueError(
                f"route {name!r}: launch option {key} = {value!r} is not one of {known[key]}"
            )

"""The whole model in hand-written kernels: one launch, or one a layer, for d_model up to 128.

Float32 interface and residual, float16 operands, float32 sums; see ``fastlayer.kernels``. Before a
launch is used on a device and compiler for the first time it proves itself there
(``kernels.proof``); one that fails is refused, with its reason, for the rest of the process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from fastlayer.contract import RuntimeContract
from fastlayer.errors import RouteRefused
from fastlayer.graphs import current_stream
from fastlayer.kernels import launches as table
from fastlayer.kernels.knobs import Launch as Knobs
from fastlayer.kernels.knobs import sizes_for
from fastlayer.masks import MaskKind
from fastlayer.routes.base import Bound, Launch, common_objections
from fastlayer.routes.sdpa import bind_sdpa
from fastlayer.weights import ModelState

if TYPE_CHECKING:
    from fastlayer.kernels.launch import Operands, Program
    from fastlayer.kernels.sizes import FusedSizes

_OLDEST = (8, 0)

#: Without the question whether CUDA is initialised: an input lies on it.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

#: Streams whose programs a model keeps; each holds a workspace.
_STREAMS = 4

#: Bytes that addresses are multiples of, as the kernels are compiled to expect.
_ALIGNMENT = 16


class FusedRoute:
    """Objects to everything its kernels were not written for, and to what failed its proof."""

    name = "fused"

    def objections(self, contract: RuntimeContract) -> list[str]:
        found = common_objections(contract)
        device = contract.device
        checks: list[tuple[bool, str]] = [
            (device.type != "cuda", f"its kernels run on CUDA devices, not on {device.type}"),
            (
                device.type == "cuda" and device.capability < _OLDEST,
                f"compute capability {device.capability} is below {_OLDEST}",
            ),
            (not has_triton(), "Triton is not installed"),
            (
                contract.mask is MaskKind.IRREGULAR,
                "the mask is irregular; the kernels take a length for each sample",
            ),
            (
                contract.capturing,
                "a CUDA graph is being captured, and its replays would not follow edited weights",
            ),
            rounds_operands(contract),
        ]
        found += [reason for applies, reason in checks if applies]
        if found:
            return found
        launches = self._candidates(contract)
        if not launches:
            return self._inability(contract)
        refused = _REFUSED.get(_shape(contract))
        return [refused] if refused else self._memory(contract, launches[0])

    def launches(self, contract: RuntimeContract) -> list[Launch]:
        return [launch.as_dict() for launch in self._candidates(contract)]

    def bind(self, state: ModelState, contract: RuntimeContract, launch: Launch) -> Bound:
        """As in the protocol.

        Raises:
            ValueError: the launch is none, or not for this shape.
            RouteRefused: the launch failed its first-use proof, or the weights do not fit float16.
        """
        knobs = Knobs.of(launch)
        reasons = knobs.objections(sizes_for(knobs, contract.config))
        if reasons:
            raise ValueError(f"route {self.name!r}, launch {dict(launch)}: {'; '.join(reasons)}")
        return _bind(state, contract, knobs)

    def _candidates(self, contract: RuntimeContract) -> list[Knobs]:
        device = contract.device
        return table.candidates(contract.config, device.capability, device.multiprocessors)

    def _inability(self, contract: RuntimeContract) -> list[str]:
        """Why no launch can compute this shape, each reason once."""
        reasons: list[str] = []
        for row in table.GENERAL:
            for reason in row.launch.objections(sizes_for(row.launch, contract.config)):
                if reason not in reasons:
                    reasons.append(reason)
        return ["; ".join(reasons)]

    def _memory(self, contract: RuntimeContract, launch: Knobs) -> list[str]:
        needed = contract.config.activation_bytes() + launch.workspace_bytes(
            sizes_for(launch, contract.config)
        )
        if needed <= contract.available_bytes:
            return []
        return [
            f"output and workspace need {needed:,} bytes and {contract.available_bytes:,} are "
            "available"
        ]


#: Why a shape is refused on a device, by ``_shape``: what failed its proof in this process.
_REFUSED: dict[Hashable, str] = {}


def _shape(contract: RuntimeContract) -> Hashable:
    return (contract.device, contract.config, contract.mask.masks)


def rounds_operands(contract: RuntimeContract) -> tuple[bool, str]:
    """Whether float16 operands would break the precision that was asked for, and how to say so."""
    precision = contract.precision
    return (
        precision.float32_matmul_precision == "highest" and not precision.allow_tf32,
        "float32 matrix products are asked for in full precision, and the kernels round "
        "operands to TF32's ten bits of mantissa (torch.set_float32_matmul_precision)",
    )


def has_triton() -> bool:
    return find_spec("triton") is not None


def _bind(state: ModelState, contract: RuntimeContract, launch: Knobs) -> Bound:
    from fastlayer.kernels.launch import operands
    from fastlayer.kernels.packing import pack
    from fastlayer.kernels.proof import Claim, refusal

    parameters = dict(state.module.named_parameters())
    device = parameters["final_norm.weight"].device
    facts, masked = contract.device, contract.mask.masks
    sizes = sizes_for(launch, contract.config)
    weights = state.get(("fused weights", sizes.narrowest_head), lambda: pack(parameters, sizes))
    if weights.overflow:
        state.notes.append(
            "fused: a folded weight, or an activation that the weights allow, leaves float16's "
            "range or precision; float32 attention ran instead"
        )
        return bind_sdpa("sdpa", state, contract, {})
    maximum = launch.keeps_maximum(weights.score_bounds, sizes)
    index = device.index or 0
    claim = Claim(launch, contract.config, masked, maximum, index, facts.name, facts.capability)
    reason = refusal(claim)
    if reason:
        _REFUSED[_shape(contract)] = reason
        raise RouteRefused(FusedRoute.name, reason)
    packed = state.get(("fused operands", launch), lambda: operands(launch, sizes, weights))
    return _FusedCall(launch, sizes, packed, device, masked)


class _FusedCall:
    """One shape on one device. A stream's programs share no workspace with another's."""

    #: A call reads packed copies of the parameters, and no parameter itself.
    reads_copies = True

    def __init__(
        self, launch: Knobs, sizes: FusedSizes, packed: Operands, device: torch.device, masked: bool
    ) -> None:
        self._launch = launch
        self._sizes = sizes
        self._packed = packed
        self._device = device
        self._index = device.index or 0
        self._masked = masked
        self._programs: OrderedDict[int, Program] = OrderedDict()

    def __call__(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if not x.is_contiguous() or x.data_ptr() % _ALIGNMENT:
            x = x.clone(memory_format=torch.contiguous_format)
        out = torch.empty_like(x)
        if not x.numel():
            return out
        lengths = mask.sum(1, dtype=torch.int32) if self._masked and mask is not None else None
        index = self._index
        if _current_device() != index:
            with torch.cuda.device(index):
                stream = current_stream(index)
                self._program(stream)(x, out, lengths, stream)
            return out
        stream = current_stream(index)
        program = self._programs.get(stream) or self._program(stream)
        program(x, out, lengths, stream)
        return out

    def _program(self, stream: int) -> Program:
        """That stream's program, on the current device."""
        program = self._programs.get(stream)
        if program is None:
            program = self._programs[stream] = self._new_program()
            if len(self._programs) > _STREAMS:
                self._programs.popitem(last=False)
        return program

    def _new_program(self) -> Program:
        from fastlayer.kernels.launch import Program, new_workspace

        with torch.inference_mode(False):
            workspace = new_workspace(self._launch, self._sizes, self._device)
        return Program(self._launch, self._sizes, self._packed, workspace, self._masked)

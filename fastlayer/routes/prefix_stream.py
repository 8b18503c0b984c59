"""Long sequences, one sample at a time and only its valid prefix.

Memory above input and output is that of one sample, whatever the batch, and padding costs nothing.
The interface and parameters are float32; products take float16 operands, except under
``float32_matmul_precision="highest"``, where everything is float32 and exact. A sample whose mask
is irregular is compacted first (attention that skips invalid keys is attention over the valid ones
in their order) and its attention is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fastlayer.config import as_size
from fastlayer.contract import RuntimeContract
from fastlayer.masks import MaskKind
from fastlayer.polynomial import CHUNK, COEFFICIENTS, EXACT_ROWS, Guard, committed_guard
from fastlayer.routes.base import Bound, Launch, check_launch, common_objections
from fastlayer.routes.long_attention import BACKEND_NAMES
from fastlayer.routes.prefix_body import (
    LEAST_ROWS,
    Plan,
    PrefixBody,
    Tally,
    fixed_bytes,
    row_bytes,
)
from fastlayer.weights import ModelState

ATTENTION_NAMES = ("guarded", "exact", "polynomial")

_DTYPES = {"float16": torch.float16, "float32": torch.float32}

#: Options of a launch and their values; an empty tuple stands for a size, where None means the
#: default.
_OPTIONS: dict[str, tuple[object, ...]] = {
    "attention": ATTENTION_NAMES,
    "compute": tuple(_DTYPES),
    "backend": BACKEND_NAMES,
    "coefficients": tuple(COEFFICIENTS),
    "rows": (),
    "exact_rows": (),
    "chunk": (),
}

_SIZES = tuple(option for option, values in _OPTIONS.items() if not values)

#: Tokens from which the polynomial is faster than exact attention: on an H200 7.6 ms against 6.9 at
#: 25,000 and 11.9 against 24.0 at 50,000 (``baselines/case14/scaling.json``).
POLYNOMIAL_PAYS = 32_768

#: What cuDNN's and flash's kernels take.
_LARGEST_HEAD_DIM = 256


class PrefixStreamRoute:
    """See the module."""

    name = "prefix_stream"

    def objections(self, contract: RuntimeContract) -> list[str]:
        found = streaming_objections(contract)
        if contract.config.seq_len <= EXACT_ROWS:
            found.append(
                f"{contract.config.seq_len:,} tokens are few enough for the other routes; this one "
                f"serves more than {EXACT_ROWS:,}"
            )
        return found

    def launches(self, contract: RuntimeContract) -> list[Launch]:
        compute = _computes(contract)[0]
        exact: Launch = {"attention": "exact", "compute": compute}
        if compute == "float32" or contract.mask is MaskKind.IRREGULAR:
            return [exact]
        guarded: Launch = {"attention": "guarded", "compute": compute}
        pays = contract.config.seq_len >= POLYNOMIAL_PAYS
        return [guarded, exact] if pays else [exact, guarded]

    def bind(self, state: ModelState, contract: RuntimeContract, launch: Launch) -> Bound:
        """See ``Route``.

        Raises:
            ValueError: an option or a value does not exist, float16 or anything but exact attention
                is asked for where the precision is "highest", or the memory does not suffice for
                the compute dtype.
        """
        return PrefixStream(state, contract, launch)


def streaming_objections(contract: RuntimeContract) -> list[str]:
    """Reasons, other than being short, for which samples cannot be streamed."""
    config, device = contract.config, contract.device
    found = common_objections(contract)
    if not config.causal:
        found.append("attention is not causal, and a valid prefix would depend on what follows it")
    if contract.capturing:
        found.append("a CUDA graph is being captured, and lengths are read on the host")
    if device.type == "cuda":
        if device.capability < (8, 0):
            found.append(f"fused float16 attention needs capability 8.0; this is {device.name}")
        if config.head_dim > _LARGEST_HEAD_DIM or config.head_dim % 8:
            found.append(
                f"fused attention takes head_dim up to {_LARGEST_HEAD_DIM} in steps of 8, not "
                f"{config.head_dim}"
            )
    needed = _least_bytes(contract)
    output = config.activation_bytes(contract.itemsize)
    if needed > contract.working_set_bytes:
        found.append(
            f"one sample needs {needed:,} bytes of workspace and working_set_bytes is "
            f"{contract.working_set_bytes:,}"
        )
    elif needed + output > contract.available_bytes:
        found.append(
            f"the output and one sample's workspace need {needed + output:,} bytes and "
            f"{contract.available_bytes:,} are available; fastlayer.stream keeps neither input nor "
            "output on the device"
        )
    return found


class PrefixStream:
    """The bound route: ``(x [B, N, d], mask [B, N] | None) -> [B, N, d]``."""

    def __init__(
        self,
        state: ModelState,
        contract: RuntimeContract,
        launch: Launch,
        guard: Guard | None = None,
        notes: list[str] | None = None,
    ) -> None:
        self.body = PrefixBody(state, contract.config, _plan(contract, launch, guard), notes)
        self._state = state

    def __call__(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        tally = self.body.tally()
        for index, (length, prefix) in enumerate(_lengths(x, mask)):
            if prefix:
                self._prefix(x[index], length, out[index], tally)
            else:
                assert mask is not None
                self._compacted(x[index], mask[index], out[index], tally)
        self._state.measured = (tally.text(),)
        return out

    def _prefix(self, x: torch.Tensor, length: int, out: torch.Tensor, tally: Tally) -> None:
        out[length:].zero_()
        if length:
            self.body(lambda target: target.copy_(x[:length]), out[:length], tally)

    def _compacted(
        self, x: torch.Tensor, valid: torch.Tensor, out: torch.Tensor, tally: Tally
    ) -> None:
        places = valid.nonzero()[:, 0]
        packed = x.new_empty(len(places), x.shape[1])
        self.body(lambda target: torch.index_select(x, 0, places, out=target), packed, tally, True)
        out.zero_().index_copy_(0, places, packed)


def _lengths(x: torch.Tensor, mask: torch.Tensor | None) -> Iterable[tuple[int, bool]]:
    """``(valid tokens, whether they are a prefix)`` of each sample; reads the mask once."""
    if mask is None:
        return [(x.shape[1], True)] * len(x)
    counts = mask.sum(1)
    # The last valid position plus one is the count exactly where no hole comes before it.
    ends = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1)
    pairs: list[list[int]] = torch.stack([counts, ends], 1).tolist()
    return [(count, count == end) for count, end in pairs]


def _computes(contract: RuntimeContract) -> tuple[str, ...]:
    """Compute dtypes that the contract allows, the default first."""
    if contract.precision.float32_matmul_precision == "highest":
        return ("float32",)
    return ("float16", "float32") if contract.device.type == "cuda" else ("float32", "float16")


def _least_bytes(contract: RuntimeContract) -> int:
    itemsize = _DTYPES[_computes(contract)[0]].itemsize
    irregular = contract.mask is MaskKind.IRREGULAR
    least = min(LEAST_ROWS, contract.config.seq_len)
    fixed = fixed_bytes(contract.with_batch(1).config, itemsize, irregular)
    return fixed + least * row_bytes(contract.config, itemsize)


def check_options(launch: Launch) -> None:
    """Raises ``ValueError`` for what no call admits: unknown options and values, and no sizes."""
    if not isinstance(launch, Mapping):
        raise ValueError(
            f"route 'prefix_stream': given launch = {launch!r}; expected a mapping such as "
            "{'attention': 'exact'}"
        )
    check_launch(PrefixStreamRoute.name, launch, _OPTIONS)
    for option in _SIZES:
        _size(launch, option, 1)
    chunk, exact_rows = _size(launch, "chunk", CHUNK), _size(launch, "exact_rows", EXACT_ROWS)
    if exact_rows % chunk:
        raise ValueError(
            f"route 'prefix_stream': given exact_rows = {exact_rows}; expected a multiple of chunk "
            f"= {chunk}. Change either."
        )


def _size(launch: Launch, option: str, default: int) -> int:
    value = launch.get(option)
    size = default if value is None else as_size(value)
    if size is None:
        raise ValueError(
            f"route 'prefix_stream': given {option} = {value!r}; expected an integer of at least "
            "1, or None for the default. It counts rows."
        )
    return size


def _plan(contract: RuntimeContract, launch: Launch, guard: Guard | None) -> Plan:
    check_options(launch)
    highest = contract.precision.float32_matmul_precision == "highest"
    computes = _computes(contract)
    compute = str(launch.get("compute", computes[0]))
    default = "exact" if compute == "float32" else "guarded"
    attention = str(launch.get("attention", default))
    for option, value, allowed in (
        ("compute", compute, computes),
        ("attention", attention, ("exact",) if highest else _OPTIONS["attention"]),
    ):
        if value not in allowed:
            raise ValueError(
                f"route 'prefix_stream': given {option} = {value!r} under "
                f"float32_matmul_precision = 'highest'; expected {allowed[0]!r}. Lower the "
                f"precision setting to allow {value}."
            )
    dtype = _DTYPES[compute]
    output = contract.config.activation_bytes(contract.itemsize)
    room = min(contract.working_set_bytes, contract.available_bytes - output)
    room -= fixed_bytes(contract.config, dtype.itemsize, contract.mask is MaskKind.IRREGULAR)
    fitting = room // row_bytes(contract.config, dtype.itemsize)
    least = min(LEAST_ROWS, contract.config.seq_len)
    if fitting < least and launch.get("rows") is None:
        raise ValueError(
            f"route 'prefix_stream': given compute = {compute!r} and room for blocks of "
            f"{max(0, fitting):,} rows; expected at least {least:,}. Raise working_set_bytes "
            f"({contract.working_set_bytes:,}) or free memory ({contract.available_bytes:,} bytes "
            "are available)."
        )
    rows = min(contract.config.seq_len, max(1, fitting))
    return Plan(
        dtype=dtype,
        attention=attention,
        backend=str(launch.get("backend", "auto")),
        coefficients=str(launch.get("coefficients", "rows")),
        rows=_size(launch, "rows", rows),
        exact_rows=_size(launch, "exact_rows", EXACT_ROWS),
        chunk=_size(launch, "chunk", CHUNK),
        room=max(0, room),
        guard=guard or committed_guard(),
    )

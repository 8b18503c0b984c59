"""Samples from anywhere, one at a time, through a model that need not hold the batch.

    stream(model, source, sink)

``source`` is any iterable: a list, a generator, rows of a memory-mapped file. Each sample is
computed as the route ``prefix_stream`` computes it, on its valid prefix only. On CUDA samples go
through pinned buffers on two streams of their own: while one is computed, the next is uploaded and
the one before downloaded, so a 16 GB card serves a batch of any size. On a CPU nothing is copied.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from fastlayer.alterations import call_alteration
from fastlayer.config import TransformerConfig, workspace_size
from fastlayer.contract import GIB, RuntimeContract
from fastlayer.errors import InputError, RouteError
from fastlayer.masks import MaskKind
from fastlayer.model import FastTransformer
from fastlayer.reference import ReferenceTransformer
from fastlayer.routes import Launch
from fastlayer.routes.prefix_body import Tally
from fastlayer.routes.prefix_stream import (
    PrefixStream,
    PrefixStreamRoute,
    check_options,
    streaming_objections,
)

#: Bytes that cross the bus in one piece. The guard's few numbers cross on the same copy engine, in
#: the order of requests: behind a whole result of 400 MB they would wait 8 ms, as would the device.
_PIECE_BYTES = 16 * 2**20

Sample = torch.Tensor | tuple[torch.Tensor, int]

#: Called with a sample's index and its output ``[N, d_model]`` on the sample's device. The tensor
#: is valid during the call only: copy what should outlive it.
Sink = Callable[[int, torch.Tensor], object]

#: Called with the samples done and their number, or None where the source does not know it.
Progress = Callable[[int, int | None], object]


@dataclass(frozen=True, slots=True)
class StreamReport:
    """What a stream did.

    Attributes:
        samples, tokens: how many were computed; tokens counts valid ones only.
        notes: what the guard measured, and whatever went otherwise than planned.
    """

    samples: int
    tokens: int
    notes: tuple[str, ...]


def stream(
    model: ReferenceTransformer,
    source: Iterable[Sample],
    sink: Sink,
    *,
    workspace_bytes: int = 4 * GIB,
    progress: Progress | None = None,
    launch: Launch | None = None,
) -> StreamReport:
    """Computes every sample of ``source`` and hands its output to ``sink``, in order.

    Args:
        model: a reference or ``FastTransformer``; it computes where its parameters lie. Edited or
            replaced on the way, as they are when a sample is computed. A ``FastTransformer`` keeps
            what was packed from its weights for the next stream; for any other it is packed anew.
        source: samples ``[N, d_model]`` float32, or ``(sample, length)`` where only the first
            ``length`` tokens are valid; the output is zero beyond them. Lengths may differ.
        sink: receives ``(index, output)``.
        workspace_bytes: bound on the device memory of one sample's computation; on CUDA two
            samples' inputs and outputs come on top.
        progress: receives ``(done, total)`` after each sample.
        launch: of the route ``prefix_stream``; its default where None.

    Raises:
        InputError: ``workspace_bytes`` is no size, a sample does not fit (the message has its
            index), or the model was moved to another device on the way.
        RouteError: samples of this kind cannot be streamed here, with the reasons; or the model
            has a forward, a hook, a submodule or a setting of its own, now or after some samples.
        ValueError: ``launch`` holds an option or a value that does not exist.
    """
    with torch.no_grad():
        engine = _Engine(model, workspace_bytes, launch)
        total = len(source) if isinstance(source, Sized) else None
        device = engine.device
        run = _overlapped if device.type == "cuda" else _directly
        done = tokens = 0
        # Closed even if the sink raises: copies in flight are waited for.
        with closing(run(engine, _checked(source, engine))) as outputs:
            for output, length in outputs:
                sink(done, output)
                done += 1
                tokens += length
                if progress is not None:
                    progress(done, total)
    return StreamReport(done, tokens, engine.notes())


def _checked(source: Iterable[Sample], engine: _Engine) -> Iterator[tuple[torch.Tensor, int]]:
    for index, item in enumerate(source):
        what = f"sample {index}"
        if isinstance(item, tuple) and len(item) != 2:
            raise InputError(
                what, f"a tuple of {len(item)}", "a tensor, or (tensor, length)", "One at a time."
            )
        x, length = item if isinstance(item, tuple) else (item, None)
        width = engine.model.final_norm.weight.shape[0]
        if not isinstance(x, torch.Tensor) or x.dim() != 2 or x.shape[1] != width:
            given = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise InputError(what, f"{given}", f"a tensor [tokens, {width}]", "One at a time.")
        if x.layout is not torch.strided:
            raise InputError(what, f"layout {x.layout}", "a dense tensor", "Call .to_dense().")
        if x.dtype != torch.float32:
            raise InputError(what, f"{x.dtype}", "torch.float32", "Convert it.")
        if x.device.type != "cpu" and x.device != engine.device:
            raise InputError(what, f"{x.device}", f"cpu or {engine.device}", "Move it there.")
        yield x, len(x) if length is None else _valid_tokens(what, length, len(x))


def _valid_tokens(what: str, length: object, tokens: int) -> int:
    """An integer of any type from 0 to ``tokens``; neither a bool nor a mask is one."""
    flag = isinstance(length, bool) or getattr(length, "dtype", None) is torch.bool
    try:
        count = -1 if flag else operator.index(length)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if 0 <= count <= tokens:
        return count
    raise InputError(
        what,
        f"length {length!r}",
        f"an integer from 0 to {tokens}",
        "The length counts the valid tokens, which come first.",
    )


class _Engine:
    """The model as ``PrefixStream`` bodies, one for each sample length, always fresh."""

    def __init__(
        self, model: ReferenceTransformer, workspace_bytes: int, launch: Launch | None
    ) -> None:
        size = workspace_size(workspace_bytes)
        if launch is not None:
            check_options(launch)
        self._given = model
        self._workspace = size
        self._launch = launch
        self._bound: dict[tuple[int, int], PrefixStream] = {}
        self._tally: Tally | None = None
        self._notes: list[str] = []
        if hasattr(model, "config"):
            _refuse_alterations(model, TransformerConfig.of(model.config))
        self._take_parameters()
        self.device = self.model.final_norm.weight.device

    def _take_parameters(self) -> None:
        """The caller's model where it keeps packed weights, else one over the same parameters."""
        given = self._given
        if isinstance(given, FastTransformer):
            self.model = given
        else:
            self.model = FastTransformer.from_reference(given)
        self._bound.clear()
        self._taken = _parameters(given)

    def __call__(self, x: torch.Tensor, length: int, out: torch.Tensor) -> None:
        """``x [N, d]`` and its valid length to ``out [N, d]``, both on the device."""
        out[length:].zero_()
        self._follow()
        if not length:
            return
        body = self._bind(x[:length]).body
        if self._tally is None:
            self._tally = body.tally()
        body(lambda target: target.copy_(x[:length]), out[:length], self._tally)

    def _follow(self) -> None:
        """Takes what replaced a parameter of the caller's model; in-place edits show by themselves.

        Only parameters are shared: whatever else changed that model's result is refused.
        """
        _refuse_alterations(self._given, self.model._shape)
        present = _parameters(self._given)
        if present.keys() != self._taken.keys() or any(
            present[name] is not held for name, held in self._taken.items()
        ):
            self._take_parameters()
        where = self.model.final_norm.weight.device
        if where != self.device:
            raise InputError(
                "stream", f"a model moved to {where} on the way", f"{self.device}", "Stream anew."
            )

    def _bind(self, x: torch.Tensor) -> PrefixStream:
        state = self.model._own_runtime().state
        key = (state.refresh(), len(x))
        if key not in self._bound:
            contract = self.model._contract(x[None], MaskKind.NONE, compiling=False)
            # Nothing is allocated for the output: that is the caller's, and already there.
            output = contract.config.activation_bytes(contract.itemsize)
            contract = replace(
                contract,
                available_bytes=contract.available_bytes + output,
                working_set_bytes=self._workspace,
            )
            self._refuse(contract)
            route = PrefixStreamRoute()
            launch = route.launches(contract)[0] if self._launch is None else self._launch
            bound = PrefixStream(state, contract, launch, notes=self._notes)
            self._bound = {key: bound}
        return self._bound[key]

    @staticmethod
    def _refuse(contract: RuntimeContract) -> None:
        objections = streaming_objections(contract)
        if objections:
            raise _refusal(objections)

    def notes(self) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(self._notes))
        return found if self._tally is None else (self._tally.text(), *found)


def _parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _refuse_alterations(model: ReferenceTransformer, config: TransformerConfig) -> None:
    """Of the caller's own modules, which are not what runs here.

    Raises:
        RouteError: a call of ``model`` would not run as the plain one's does.
    """
    reason = call_alteration(model, config)
    if reason:
        raise _refusal([reason])


def _refusal(reasons: list[str]) -> RouteError:
    return RouteError(
        PrefixStreamRoute.name,
        reasons,
        (),
        remedy="stream runs this route alone: change what it objects to, or call the model itself.",
    )


def _directly(
    engine: _Engine, samples: Iterable[tuple[torch.Tensor, int]]
) -> Generator[tuple[torch.Tensor, int]]:
    for x, length in samples:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        engine(x, length, out)
        yield out, length


class _Slot:
    """Buffers of one sample in flight, on the device and pinned on the host, grown as needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._grown = False
        self.x = self.out = self.result = torch.empty(0)
        self.source: torch.Tensor | None = None
        self.on_host = True
        self.length = 0
        self.uploaded = torch.cuda.Event()
        self.computed = torch.cuda.Event()
        self.downloaded = torch.cuda.Event()

    def _buffer(self, name: str, like: torch.Tensor, pinned: bool) -> torch.Tensor:
        held = self._buffers.get(name)
        if held is None or held.numel() < like.numel():
            self._buffers.pop(name, None)
            where = "cpu" if pinned else self._device
            held = torch.empty(like.numel(), dtype=like.dtype, device=where, pin_memory=pinned)
            self._buffers[name] = held
            self._grown = True
        return held[: like.numel()].view(like.shape)

    def upload(self, x: torch.Tensor, length: int, on: torch.cuda.Stream) -> None:
        """Only the valid prefix travels. The slot's previous download has been waited for."""
        self.length = length
        self.on_host = not x.is_cuda
        self.out = self._buffer("out", x, pinned=False)
        if not self.on_host:
            self.x = x
            self.uploaded.record(torch.cuda.current_stream(self._device))
            return
        valid = x[:length]
        if not valid.is_pinned():
            # The event says that the copy out of this pinned buffer two samples ago is over.
            self.uploaded.synchronize()
            valid = self._buffer("staged", x, pinned=True)[:length].copy_(valid)
        self.x = self._buffer("x", x, pinned=False)
        if self._grown:
            # The allocator hands out memory that kernels of the current stream may still use.
            on.wait_stream(torch.cuda.current_stream(self._device))
            self._grown = False
        with torch.cuda.stream(on):
            # The sample before in this slot must have been read.
            on.wait_event(self.computed)
            _cross(valid, self.x[:length])
            self.uploaded.record(on)
        self.source = valid  # Held until the copy is over.

    def download(self, on: torch.cuda.Stream) -> None:
        if not self.on_host:
            self.result = self.out
            self.downloaded.record(torch.cuda.current_stream(self._device))
            return
        self.result = self._buffer("result", self.out, pinned=True)
        with torch.cuda.stream(on):
            on.wait_event(self.computed)
            _cross(self.out, self.result)
            self.downloaded.record(on)


def _cross(source: torch.Tensor, target: torch.Tensor) -> None:
    """Enqueues the copy of ``source [n, d]`` to ``target`` between host and device, in pieces."""
    rows = max(1, _PIECE_BYTES // max(1, source[:1].nbytes))
    for piece, place in zip(source.split(rows), target.split(rows), strict=True):
        place.copy_(piece, non_blocking=True)


def _overlapped(
    engine: _Engine, samples: Iterable[tuple[torch.Tensor, int]]
) -> Generator[tuple[torch.Tensor, int]]:
    """Upload of the next, computation of this one, and download of the one before, at once.

    The next upload is issued before the computation, which synchronises with the host to read the
    guard's numbers; a result is handed on after the following sample was computed.
    """
    with torch.cuda.device(engine.device):
        upload, download = torch.cuda.Stream(), torch.cuda.Stream()
        compute = torch.cuda.current_stream()
        slots = [_Slot(engine.device) for _ in range(3)]
        waiting: list[_Slot] = []
        feed = enumerate(samples)
        try:
            here = _next_slot(feed, slots, upload)
            while here is not None:
                ahead = _next_slot(feed, slots, upload)
                compute.wait_event(here.uploaded)
                engine(here.x, here.length, here.out)
                here.computed.record(compute)
                here.download(download)
                waiting.append(here)
                if len(waiting) > 1:
                    yield _finished(waiting.pop(0))
                here = ahead
            while waiting:
                yield _finished(waiting.pop(0))
        finally:
            # Whatever ended this, no copy may outlive the buffers it reads and writes.
            for each in (upload, download, compute):
                each.synchronize()


def _next_slot(
    feed: Iterator[tuple[int, tuple[torch.Tensor, int]]],
    slots: list[_Slot],
    upload: torch.cuda.Stream,
) -> _Slot | None:
    for index, (x, length) in feed:
        slot = slots[index % len(slots)]
        slot.upload(x, length, upload)
        return slot
    return None


def _finished(slot: _Slot) -> tuple[torch.Tensor, int]:
    slot.downloaded.synchronize()
    return slot.result, slot.length

"""Samples from anywhere, one at a time, through a model that need not hold the batch.

    stream(model, source, sink)

``source`` is any iterable: a list, a generator, rows of a memory-mapped file. Each sample is
computed as the route ``prefix_stream`` computes it, on its valid prefix only. On CUDA samples go
through pinned buffers on two streams of their own: while one is computed, the next is uploaded and
the one before downloaded, so a 16 GB card serves a batch of any size. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from fastlayer.contract import GIB, RuntimeContract
from fastlayer.errors import InputError, RouteError
from fastlayer.masks import MaskKind
from fastlayer.model import FastTransformer
from fastlayer.reference import ReferenceTransformer
from fastlayer.routes import Launch
from fastlayer.routes.prefix_body import Tally
from fastlayer.routes.prefix_stream import PrefixStream, PrefixStreamRoute, streaming_objections
from fastlayer.weights import alteration

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
        model: a reference or ``FastTransformer``; it computes where its parameters lie.
        source: samples ``[N, d_model]`` float32, or ``(sample, length)`` where only the first
            ``length`` tokens are valid; the output is zero beyond them. Lengths may differ.
        sink: receives ``(index, output)``.
        workspace_bytes: bound on the device memory of one sample's computation; on CUDA two
            samples' inputs and outputs come on top.
        progress: receives ``(done, total)`` after each sample.
        launch: of the route ``prefix_stream``; its default where None.

    Raises:
        InputError: a sample does not fit; the message has its index.
        RouteError: samples of this kind cannot be streamed here, with the reasons.
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
        x, length = item if isinstance(item, tuple) else (item, None)
        width = engine.model.final_norm.weight.shape[0]
        if not isinstance(x, torch.Tensor) or x.dim() != 2 or x.shape[1] != width:
            given = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise InputError(
                f"sample {index}",
                f"{given}",
                f"a tensor [tokens, {width}]",
                "One sample at a time.",
            )
        if x.dtype != torch.float32:
            raise InputError(f"sample {index}", f"{x.dtype}", "torch.float32", "Convert it.")
        if x.device.type not in ("cpu", engine.device.type):
            raise InputError(
                f"sample {index}", f"{x.device}", f"cpu or {engine.device}", "Move it there."
            )
        length = x.shape[0] if length is None else int(length)
        if not 0 <= length <= x.shape[0]:
            raise InputError(
                f"sample {index}",
                f"length {length}",
                f"0 to {x.shape[0]}",
                "The length counts valid tokens.",
            )
        yield x, length


class _Engine:
    """The model as ``PrefixStream`` bodies, one for each sample length, always fresh."""

    def __init__(
        self, model: ReferenceTransformer, workspace_bytes: int, launch: Launch | None
    ) -> None:
        # A model of its own over the same parameters: what is packed here is dropped with it.
        self.model = FastTransformer.from_reference(model, working_set_bytes=workspace_bytes)
        self._given = model
        self.device = self.model.final_norm.weight.device
        self._launch = launch
        self._bound: dict[tuple[int, int], PrefixStream] = {}
        self._tally: Tally | None = None

    def __call__(self, x: torch.Tensor, length: int, out: torch.Tensor) -> None:
        """``x [N, d]`` and its valid length to ``out [N, d]``, both on the device."""
        out[length:].zero_()
        self._refuse_alterations()
        if not length:
            return
        body = self._bind(x[:length]).body
        if self._tally is None:
            self._tally = body.tally()
        body(lambda target: target.copy_(x[:length]), out[:length], self._tally)

    def _bind(self, x: torch.Tensor) -> PrefixStream:
        state = self.model._own_runtime().state
        key = (state.refresh(), len(x))
        if key not in self._bound:
            contract = self.model._contract(x[None], MaskKind.NONE, compiling=False)
            # Nothing is allocated for the output: that is the caller's, and already there.
            output = contract.config.activation_bytes(contract.itemsize)
            contract = replace(contract, available_bytes=contract.available_bytes + output)
            self._refuse(contract)
            route = PrefixStreamRoute()
            launch = route.launches(contract)[0] if self._launch is None else self._launch
            self._bound = {key: PrefixStream(state, contract, launch)}
        return self._bound[key]

    def _refuse_alterations(self) -> None:
        """Of the caller's own modules, which are not what runs here: only their parameters are."""
        if not isinstance(self._given, ReferenceTransformer):
            return
        reason = alteration(self._given, self.model._shape)
        if self._given._forward_hooks or self._given._forward_pre_hooks:
            reason = "the model carries a hook"
        if reason:
            raise RouteError(PrefixStreamRoute.name, [reason], ())

    @staticmethod
    def _refuse(contract: RuntimeContract) -> None:
        objections = streaming_objections(contract)
        if objections:
            raise RouteError(PrefixStreamRoute.name, objections, ())

    def notes(self) -> tuple[str, ...]:
        found = tuple(self.model._own_runtime().state.notes)
        return found if self._tally is None else (self._tally.text(), *found)


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
            self.x[:length].copy_(valid, non_blocking=True)
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
            self.result.copy_(self.out, non_blocking=True)
            self.downloaded.record(on)


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

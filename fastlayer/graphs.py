"""CUDA-graph capture and replay: copy in, replay, clone out.

Kernels read and write fixed addresses during replay, so every call copies its input into the
graph's own buffer, and a result leaves as a clone: an output held by the caller is never written
again. A body whose first step writes and whose last step reads all of its activations can do these
two outside the graph instead (``Staged``), which saves both copies. All graphs of a stream share
one memory pool; that is safe because they replay on that stream, one after the other, and each
keeps its own output alive.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch

#: The handle of the current stream of the CUDA device with that index, as compiled kernels take it;
#: where torch does not tell it alone, by way of a stream object.
current_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda index: torch.cuda.current_stream(index).cuda_stream,
)

#: Graphs whose owners went while a graph was being captured: see ``_Owned``.
_POSTPONED: list[torch.cuda.CUDAGraph] = []

Body = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]

S = TypeVar("S")


class Staged(Protocol[S]):
    """A body in three stages, of which a graph holds the middle one.

    ``inside(enter(x), mask)`` then ``leave(state, mask)`` is the call. ``enter`` makes a state, or
    fills ``into`` with what it would have made; ``inside`` works on a state in place, which may
    leave anything in it but what ``leave`` reads; ``leave`` makes a new tensor, or fills ``into``.
    """

    def __call__(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor: ...

    def enter(self, x: torch.Tensor, into: S | None = None) -> S: ...

    def inside(self, state: S, mask: torch.Tensor | None) -> None: ...

    def leave(
        self, state: S, mask: torch.Tensor | None, into: torch.Tensor | None = None
    ) -> torch.Tensor: ...


class _Copied:
    """Any body as a staged one. Its state is a copy of the input, and the last result."""

    def __init__(self, body: Body) -> None:
        self._body = body

    def __call__(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return self._body(x, mask)

    def enter(self, x: torch.Tensor, into: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        if into is None:
            into = [torch.empty(x.shape, dtype=x.dtype, device=x.device)]
        into[0].copy_(x)
        return into

    def inside(self, state: list[torch.Tensor], mask: torch.Tensor | None) -> None:
        state[1:] = [self._body(state[0], mask)]

    def leave(
        self,
        state: list[torch.Tensor],
        mask: torch.Tensor | None,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return state[1].clone() if into is None else into.copy_(state[1])


#: Eager runs before a capture: libraries choose algorithms and allocate workspaces in these.
_WARMUPS = 2


class GraphCache:
    """The graphs of one model, at most ``limit`` captured at a time, least recently used out."""

    def __init__(self, limit: int = 16) -> None:
        self.limit = limit
        self._live: OrderedDict[int, GraphedCall] = OrderedDict()
        self._pools: dict[int, Any] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._live)

    def bind(self, body: Body, note: Callable[[str], None]) -> GraphedCall:
        """A call that captures ``body`` at its first use and replays it afterwards.

        ``body`` must not synchronise with the host. ``note`` is told why, if capture fails; the
        call then runs ``body`` eagerly.
        """
        return self.bind_staged(_Copied(body), note)

    def bind_staged(self, body: Staged[Any], note: Callable[[str], None]) -> GraphedCall:
        """The same for a body of which only ``inside`` is captured."""
        return GraphedCall(self, body, note)

    def clear(self) -> None:
        with self._lock:
            for call in self._live.values():
                call.release()
            self._live.clear()
            self._pools.clear()

    def _pool(self, stream: int) -> Any:
        if stream not in self._pools:
            self._pools[stream] = torch.cuda.graph_pool_handle()
        return self._pools[stream]

    def _touch(self, call: GraphedCall) -> None:
        key = id(call)
        self._live[key] = call
        self._live.move_to_end(key)
        while len(self._live) > self.limit:
            _, oldest = self._live.popitem(last=False)
            oldest.release()


class GraphedCall:
    """One body for one contract, captured once for each stream that calls it."""

    def __init__(self, cache: GraphCache, body: Staged[Any], note: Callable[[str], None]) -> None:
        self._cache = cache
        self._body = body
        self._note = note
        self._captured: dict[int, _Captured] = {}
        self._failed = False

    @property
    def captured(self) -> bool:
        return bool(self._captured)

    def __call__(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if self._failed:
            return self._body(x, mask)
        with self._cache._lock:
            graph = self._ready(x, mask)
            if graph is not None:
                return graph.replay(x, mask)
        return self._body(x, mask)

    def into(self, out: torch.Tensor, x: torch.Tensor, mask: torch.Tensor | None) -> None:
        """The same result, written to ``out`` instead of a new tensor."""
        with self._cache._lock:
            graph = None if self._failed else self._ready(x, mask)
            if graph is None:
                out.copy_(self._body(x, mask))
            else:
                graph.replay(x, mask, out)

    def release(self) -> None:
        self._captured.clear()

    def _ready(self, x: torch.Tensor, mask: torch.Tensor | None) -> _Captured | None:
        stream = current_stream(x.get_device())
        graph = self._captured.get(stream)
        if graph is None:
            try:
                graph = _Captured(self._body, x, mask, self._cache._pool(stream))
            except RuntimeError as error:
                self._failed = True
                self.release()
                reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
                self._note(f"graph capture failed ({reason}); the route runs eagerly")
                return None
            self._captured[stream] = graph
        self._cache._touch(self)
        return graph


class _Owned:
    """A graph that is never destroyed during a capture, which that would break off.

    A model is part of reference cycles: the collector may free it, and its graphs, in the middle of
    anyone's capture.
    """

    def __init__(self) -> None:
        _POSTPONED.clear()  # Nothing is being captured where a capture is about to begin.
        self.graph = torch.cuda.CUDAGraph()

    def __del__(self) -> None:
        with suppress(RuntimeError):  # at exit the driver no longer answers
            if torch.cuda.is_current_stream_capturing():
                _POSTPONED.append(self.graph)


class _Captured:
    """One captured graph with its state and its mask."""

    def __init__(
        self, body: Staged[Any], x: torch.Tensor, mask: torch.Tensor | None, pool: Any
    ) -> None:
        self._body = body
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(x.device):
            self._state = body.enter(x)
            self._mask = None if mask is None else mask.clone()
            caller = torch.cuda.current_stream()
            side = torch.cuda.Stream()
            side.wait_stream(caller)
            with torch.cuda.stream(side):
                for _ in range(_WARMUPS):
                    body.inside(self._state, self._mask)
            caller.wait_stream(side)
            self._owned = _Owned()
            with torch.cuda.graph(self._owned.graph, pool=pool, capture_error_mode="thread_local"):
                body.inside(self._state, self._mask)

    def replay(
        self, x: torch.Tensor, mask: torch.Tensor | None, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The result for ``x`` and ``mask``, in a new tensor or in ``into``."""
        self._body.enter(x, self._state)
        if self._mask is not None and mask is not None:
            self._mask.copy_(mask)
        self._owned.graph.replay()
        return self._body.leave(self._state, self._mask, into)

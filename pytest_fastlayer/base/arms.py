"""The two arms of a served pair: fed, settled and timed as the run commands, block by block."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch

from pytest_fastlayer import timing
from pytest_fastlayer.base import origin
from pytest_fastlayer.base.protocol import Channel, Closed
from pytest_fastlayer.clocks import Clock, collect_garbage
from pytest_fastlayer.feeding import Feed, arguments, synchronize
from pytest_fastlayer.fingerprint import fingerprints
from pytest_fastlayer.immutable import FrozenReference
from pytest_fastlayer.originals import draw, replaced_deciders
from pytest_fastlayer.outputs import leaves

#: Share of a block that runs untimed before it: the other arms' processes had the caches, and
#: their idle threads may still spin.
WARM_SHARE = 0.1
#: Seed of the arguments that arms start with; the same on both sides of the channel.
FIRST_SEED = 1234


class ServedPair(Protocol):
    """What is needed of a pair."""

    @property
    def name(self) -> str: ...
    @property
    def reference(self) -> FrozenReference: ...
    @property
    def candidate(self) -> Callable[..., Any]: ...
    @property
    def inputs(self) -> Callable[[int], Any]: ...
    @property
    def describe(self) -> Callable[[Callable[..., Any]], Mapping[str, Any]] | None: ...


def digest(values: object) -> str:
    """sha256 of the types, shapes and contents of nested arguments."""
    total = hashlib.sha256()
    for leaf in leaves(values):
        value = leaf.value
        if isinstance(value, torch.Tensor):
            total.update(f"{leaf.path} {value.dtype} {tuple(value.shape)}".encode())
            if value.layout == torch.strided and not value.is_quantized:
                flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
                total.update(flat.contiguous().view(torch.uint8).numpy().data)
        elif isinstance(value, bool | int | float | complex | str | bytes | None):
            total.update(f"{leaf.path} {value!r}".encode())
        else:  # what it prints as may hold an address
            total.update(f"{leaf.path} {type(value).__qualname__}".encode())
    return total.hexdigest()


#: The address in what an object prints as by default, another in every process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
#: What travels as it is, and what makes it of a type derived from it.
_PLAIN: dict[type, Callable[[Any], object]] = {
    kind: kind for kind in (bool, int, float, complex, str)
}


def plain(value: object) -> object:
    """A leaf as every process of a pair gives it alike: a tensor, a plain number or text.

    A number of a type of its own (of numpy, of an enum) becomes the number that it is. What is
    neither tensor, number nor text is given as the text that describes it.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return value if type(value) is torch.Tensor else value.as_subclass(torch.Tensor)
    if isinstance(value, numpy.generic):
        value = value.item()
    for kind, made in _PLAIN.items():
        if isinstance(value, kind):
            return value if type(value) is kind else made(value)
    return None if value is None else _ADDRESS.sub("", repr(value))


def flattened(output: object) -> dict[str, Any]:
    """An output as one flat mapping from the path of each leaf to what is plain of it."""
    return {path: plain(value) for path, value in leaves(output)}


def portable(output: object) -> dict[str, Any]:
    """``flattened``, as it travels in a file.

    Tensors keep their device and lose storage that they only look at.
    """

    def carried(value: object) -> object:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return value
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value

    return {path: carried(value) for path, value in flattened(output).items()}


class Fed:
    """A callable on a feed, which keeps the output of one call of a block that nobody foresees.

    What the others return is let go at once: three processes share a device.
    """

    def __init__(self, function: Callable[..., Any], feed: Feed) -> None:
        self._function = function
        self._feed = feed
        self._left = -1  #: calls before the one whose output is kept; below 0 there is none
        self._kept: Any = None

    def keep_one_of(self, calls: int) -> None:
        """Keep the output of one of the next ``calls`` calls."""
        self._left = draw(calls)

    def take(self) -> Any:
        """What was kept, which is let go here."""
        kept, self._kept = self._kept, None
        return kept

    def __call__(self) -> None:
        output = self._function(*self._feed.args)
        if self._left == 0:
            self._kept = output
        self._left -= 1


class Arms:
    """Obeys the run's commands for one pair."""

    def __init__(self, pair: ServedPair, job: Mapping[str, Any]) -> None:
        self._pair = pair
        self._job = job
        self._process = os.getpid()
        self._device = torch.device(job["device"])
        self._clock: Clock = timing.clock_for(self._device)
        self._feed = Feed(arguments(pair.inputs, FIRST_SEED), pair.inputs)
        self._arms = {
            "reference": Fed(pair.reference.target, self._feed),
            "candidate": Fed(pair.candidate, self._feed),
        }

    def obey(self, channel: Channel) -> None:
        """Answer commands until ``stop``. An exception of an arm is an answer too."""
        orders: dict[str, Callable[..., dict[str, Any]]] = {
            "output": self._output,
            "renew": self._renew,
            "block": self._block,
            "describe": self._describe,
        }
        with torch.no_grad():
            channel.send({"event": "pair", **self._facts()})
            while (order := channel.receive())["do"] != "stop":
                do, to = order.pop("do"), {"event": "answer", "id": order.pop("id")}
                try:
                    channel.send(to | orders[do](**order))
                except Closed:
                    raise
                except BaseException as error:  # whatever a stranger's code raises is its answer
                    self._end_copies()
                    text = "".join(traceback.format_exception(error))
                    print(text, file=sys.stderr, flush=True)
                    channel.send(to | {"error": f"{type(error).__name__}: {error}"[:1000]})

    def _end_copies(self) -> None:
        """End a copy of this process that an arm's call forked and left to run on."""
        if os.getpid() != self._process:
            os._exit(0)

    def _facts(self) -> dict[str, Any]:
        collect_garbage()
        tree, other = self._job["tree"], self._job["other"]
        return {
            "inputs": digest(self._feed.args),
            "clock": self._clock.name,
            "resolution_s": self._clock.resolution_s,
            "settle_s": self._clock.settle_s,
            "foreign": [] if other is None else origin.foreign(self._pair, Path(tree), Path(other)),
        }

    def _output(self, arm: str, seed: int, file: str) -> dict[str, Any]:
        """What the arm makes of fresh contents, saved to ``file``, and what it does to them."""
        function = self._pair.candidate if arm == "candidate" else self._pair.reference.target
        args = arguments(self._pair.inputs, seed)
        names = [i.path for i in leaves(args, "input") if isinstance(i.value, torch.Tensor)]
        before = fingerprints(args)
        output = function(*args)
        self._end_copies()
        synchronize(self._device)
        both = zip(names, before, fingerprints(args), strict=True)
        torch.save(portable(output), file)
        return {"overwrote": [name for name, old, new in both if old != new]}

    def _describe(self) -> dict[str, Any]:
        described: Mapping[str, Any] = {}
        if self._pair.describe is not None:
            described = self._pair.describe(self._pair.candidate)
        launch = described.get("launch")
        return {
            "route": described.get("route"),
            "launch": {str(k): v for k, v in launch.items()} if launch else None,
        }

    def _renew(self, seed: int) -> dict[str, Any]:
        self._feed.renew(seed)
        synchronize(self._device)
        return {}

    def _block(
        self, arm: str, forwards: int, cold: bool, file: str | None = None
    ) -> dict[str, Any]:
        """One timed block; its seconds are of the whole block.

        With ``file`` the output of one of the timed calls is saved there, for the run to compare.
        """
        fed = self._arms[arm]
        for _ in range(round(WARM_SHARE * forwards)):
            fed()
        fed.keep_one_of(forwards)
        block = self._clock.block(fed, forwards, cold=cold)
        self._end_copies()
        output = fed.take()
        if file is not None:
            torch.save(portable(output), file)
        return {
            "seconds": block.seconds,
            "wall_s": block.wall_s,
            "tail_s": block.tail_s,
            "replaced": [*timing.patched_timers(), *replaced_deciders()],
        }

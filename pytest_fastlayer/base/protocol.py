"""The pipe between a run and a process that serves one arm: one JSON object a line."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_fastlayer.base.server import Server

#: Where the process of an arm keeps its server; the ``paired`` fixture looks here.
SERVER: pytest.StashKey[Server] = pytest.StashKey()
#: Longest message that is read: a longer one is no answer to anything that is asked.
MAX_BYTES = 1 << 20
#: Seconds between two looks at whether the other end's process still lives: what it started may
#: hold its end of the pipe open.
WATCH_S = 0.5
#: Longest time, in seconds, that a message may speak of.
MAX_SECONDS = 1e9


class Closed(ConnectionError):
    """The other end is gone."""


class Unexpected(ValueError):
    """The other end sent what is no message, or not one that was due."""


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= MAX_SECONDS  # type: ignore[operator]


def _is_whole(value: object) -> bool:
    return type(value) is int


_Fields = Mapping[str, Callable[[object], bool]]
#: What each event holds, from the process of an arm to the run.
EVENTS: Mapping[str, _Fields] = {
    "unsupported": {"text": _is_text},
    "uncollected": {"text": _is_text},
    "failed": {"text": _is_text},
    "skipped": {"text": _is_text},
    "end": {"code": _is_whole, "others": _are_texts},
    "pair": {
        "inputs": _is_text,
        "clock": lambda value: value in ("cuda_events", "cpu_clock"),
        "resolution_s": _is_time,
        "settle_s": _is_time,
        "foreign": _are_texts,
    },
    "answer": {"id": _is_whole},
}
#: What the answer to each order holds, unless it is ``{"error": text}``.
ANSWERS: Mapping[str, _Fields] = {
    "output": {"overwrote": _are_texts},
    "renew": {},
    "describe": {
        "route": lambda value: value is None or isinstance(value, str),
        "launch": lambda value: value is None or isinstance(value, dict),
    },
    "block": {
        "seconds": _is_time,
        "wall_s": _is_time,
        "tail_s": _is_time,
        "replaced": _are_texts,
    },
}
#: Beside these, only what ends a test may come.
_ENDINGS = frozenset(EVENTS) - {"pair", "answer"}


def check_message(message: object, wanted: str) -> dict[str, Any]:
    """``message``, if it is an event that may come where ``wanted`` is due. Raises Unexpected."""
    if not isinstance(message, dict) or not isinstance(message.get("event"), str):
        raise Unexpected(f"it sent {message!r:.100}, which is no message")
    event = message["event"]
    if event != wanted and event not in _ENDINGS:
        raise Unexpected(f"it sent {event!r:.100} where {wanted!r} was due")
    return check_fields(message, EVENTS[event], event)


def check_fields(message: dict[str, Any], fields: _Fields, what: str) -> dict[str, Any]:
    """``message``, if it holds ``fields``. Raises Unexpected."""
    for name, is_right in fields.items():
        if name not in message:
            raise Unexpected(f"its {what} lacks {name!r}")
        if not is_right(message[name]):
            raise Unexpected(f"its {what} says {name} = {message[name]!r:.100}")
    return message


class Channel:
    """One end of a socket pair. Messages are small; tensors travel in files that they name."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises Closed when nobody is there to read it."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Closed(str(error)) from None

    def receive(
        self, timeout_s: float | None = None, is_alive: Callable[[], bool] | None = None
    ) -> Any:
        """The next message, as it came. ``is_alive`` says whether the other process still runs.

        Raises:
            Closed: the other end, or the process that should hold it, is gone.
            TimeoutError: nothing came within ``timeout_s``.
            Unexpected: what came is no JSON.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        is_over = False
        while b"\n" not in self._buffer:
            if len(self._buffer) > MAX_BYTES:
                raise Unexpected(f"it sent a message longer than {MAX_BYTES} bytes")
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            wait = left if is_alive is None else min(WATCH_S, WATCH_S if left is None else left)
            try:
                # What a process said before it ended is still there to be read, without a wait.
                self._socket.settimeout(0 if is_over else wait)
                chunk = self._socket.recv(1 << 16)
            except TimeoutError:
                is_over = is_alive is not None and not is_alive()
                continue
            except OSError as error:
                raise Closed(str(error)) from None
            finally:
                self._socket.settimeout(None)
            if not chunk:
                raise Closed("the other end closed")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise Unexpected(f"it sent {line!r:.100}, which is no message") from None

    def close(self) -> None:
        self._socket.close()

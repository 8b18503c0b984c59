"""The pipe between a run and a process that serves one arm: one JSON object a line."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_fastlayer.base.server import Server

#: Where the process of an arm keeps its server; the ``paired`` fixture looks here.
SERVER: pytest.StashKey[Server] = pytest.StashKey()
#: Longest message that is read: a longer one is no answer to anything that is asked.
MAX_BYTES = 1 << 20


class Closed(ConnectionError):
    """The other end is gone."""


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

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The next message. Raises Closed at the end, TimeoutError after ``timeout_s``."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if len(self._buffer) > MAX_BYTES:
                raise Closed(f"a message is longer than {MAX_BYTES} bytes")
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            try:
                chunk = self._socket.recv(1 << 16)
            except TimeoutError:
                raise
            except OSError as error:
                raise Closed(str(error)) from None
            finally:
                self._socket.settimeout(None)
            if not chunk:
                raise Closed("the other end closed")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self._socket.close()

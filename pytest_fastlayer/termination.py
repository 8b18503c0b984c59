"""SIGTERM as an orderly end: what a benchmark run has measured by then is written."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


class Termination:
    """From ``begin`` to ``end``, SIGTERM interrupts this process as ^C does.

    Only where nobody else handles the signal, in the main thread, and in this process alone: a
    forked child ends as it would have. A second signal ends the process at once. One that arrives
    after ``hold``, while results are written, takes its effect at ``end``.
    """

    def __init__(self) -> None:
        self.came = False
        self._owner = 0
        self._is_held = False

    def begin(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._owner = os.getpid()
            signal.signal(signal.SIGTERM, self._handle)

    def hold(self) -> None:
        """Nothing is interrupted from here on."""
        self._is_held = True

    def end(self) -> None:
        """Restore what was there before."""
        if self._owner != os.getpid() or signal.getsignal(signal.SIGTERM) != self._handle:
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.came:
            os.kill(self._owner, signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_held and not self.came and os.getpid() == self._owner:
            self.came = True
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.came or os.getpid() != self._owner:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.came = True
        raise KeyboardInterrupt("SIGTERM")

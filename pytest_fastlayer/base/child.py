"""Run as a script in the process of one arm: pytest of one test of one tree, served over a socket.

The gate itself is this tree's: its package is imported before the served tree comes onto the
path, so that what is measured may be older than the protocol, or hold another gate.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Linux: killed when the run is, even in the middle of a forward that never ends."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(job: dict[str, Any]) -> int:
    """Serve one test. The job:

    ``gate``: folder of this package's distribution; ``path``: folders that come first when the
    tree's modules are imported; ``without``: folders that must not serve them; ``arguments`` of
    pytest; ``end``: number of the socket's file descriptor; ``case``, ``device``, ``tree`` and
    ``other``: what the server is to hand over, on which device, and whose modules it may hold.
    """
    _die_with_parent()
    here = os.path.dirname(os.path.realpath(__file__))
    original = [entry for entry in sys.path if os.path.realpath(entry) != here]
    sys.path[:] = [job["gate"], *original]
    import pytest_fastlayer  # noqa: F401  its submodules come from where it came from

    left_out = set(job["without"])
    kept = [entry for entry in original if os.path.realpath(entry) not in left_out]
    sys.path[:] = [*job["path"], *kept]

    import pytest

    from pytest_fastlayer.base.protocol import Channel
    from pytest_fastlayer.base.server import Server

    end = socket.socket(fileno=job["end"])
    # The pipe is this process's alone: its end tells the run that this process has ended, and what
    # a test starts or forks has no say in it.
    end.set_inheritable(False)
    os.register_at_fork(after_in_child=end.close)
    channel = Channel(end)
    server = Server(channel, job)
    code = int(pytest.main(job["arguments"], plugins=[server]))
    server.finished(code)
    return code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))

"""A run of these tests says nothing more after pytest's closing line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import atexit, gc
atexit.register(lambda: print("frozen:", gc.get_freeze_count()))  # the first one in runs last
import conftest
print("during the run:", gc.get_freeze_count() > 0)
"""


def test_nothing_stays_frozen_at_exit():
    """The interpreter cannot free what is frozen, and bindings by nanobind then report leaks."""
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n") == ["during the run: True", "frozen: 0", ""]

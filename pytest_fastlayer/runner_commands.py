"""What a CI runner would take for a command to itself, made harmless.

GitHub's runner reads both streams of every step. It obeys ``::name ...::`` at the start of a line,
after any spaces, and ``##[name ...]`` anywhere in one (``ActionCommand.cs`` in actions/runner).
"""

from __future__ import annotations

import re

# .NET ends a line at a carriage return as well.
_LINE_START = re.compile(r"(?<![^\r\n])(?=[^\S\r\n]*::)")


def defuse(text: str) -> str:
    """``text`` with nothing in it that a runner obeys; without a command it is returned as is."""
    return _LINE_START.sub("'", text).replace("##[", "## [")

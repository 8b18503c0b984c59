"""What the measuring commands ask of their arguments, before anything is measured.

Types for argparse, which names the option and ends with status 2: each message says what was given
and what was expected.
"""

from __future__ import annotations

import importlib.util
import math
import os
from argparse import ArgumentTypeError
from pathlib import Path


def size(text: str) -> int:
    """An integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ArgumentTypeError(f"given {text!r}; expected an integer of at least 1")
    return value


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise ArgumentTypeError(f"given {text!r}; expected a finite number above 0")
    return value


def writable(text: str) -> Path:
    """A file that could be written now, for it is written when all is measured."""
    path = Path(text)
    folder = path.parent
    if not folder.is_dir():
        raise ArgumentTypeError(
            f"given {text!r}; expected a file in a folder that exists. Make {folder} first"
        )
    if path.is_dir():
        raise ArgumentTypeError(f"given {text!r}, a folder; expected a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ArgumentTypeError(f"given {text!r}; expected a file that may be written")
    return path


def picture(text: str) -> Path:
    """A writable file in a format that matplotlib, which must be installed, draws."""
    path = writable(text)
    if not importlib.util.find_spec("matplotlib"):
        raise ArgumentTypeError(
            f"given {text!r} without matplotlib; expected it installed. pip install matplotlib"
        )
    from matplotlib.backend_bases import FigureCanvasBase

    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in formats:
        raise ArgumentTypeError(f"given {text!r}; expected a name ending in {', '.join(formats)}")
    return path

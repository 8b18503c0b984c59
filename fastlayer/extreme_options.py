"""Options of ``python -m fastlayer.extreme``, and what must hold of them before it measures."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from fastlayer.cases import CASES
from fastlayer.device import probe
from fastlayer.polynomial import CHUNK, CURVE_POINTS, EXACT_ROWS
from fastlayer.routes.long_attention import BACKEND_NAMES, NoFusedAttentionError, exact_attention
from fastlayer.routes.prefix_stream import ATTENTION_NAMES
from fastlayer.usage import picture, positive, size, writable

#: Factors on the query projection; the default initialisation's spread is about 0.33.
FACTORS = (0.6, 0.8, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0, 2.5, 3.0, 3.6)

#: Lengths measured unless others are given; all but these take case 14's.
TOKENS = {"calibrate": 32_768}
COMMANDS = ("calibrate", "accuracy", "time", "stream", "scaling")
_PLOTTED = ("calibrate", "scaling")

#: Width of a head, and rows of an output tile of the polynomial's kernel, which divide a chunk.
HEAD_DIM, _TILE_ROWS = 64, 128


def parse(arguments: list[str] | None, device: str, guard_file: Path) -> argparse.Namespace:
    """The options, which ``device`` ("cpu" or "cuda") can measure.

    Exits with status 2, and says why, where they do not fit one another or the device.
    ``guard_file`` is what ``--install`` would write.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    options.tokens = options.tokens or [TOKENS.get(options.command, CASES[14].seq_len)]
    for given, expected in _objections(options, device, guard_file):
        parser.error(f"given {given}; expected {expected}")
    return options


def _objections(
    options: argparse.Namespace, device: str, guard_file: Path
) -> Iterator[tuple[str, str]]:
    """What was given and what was expected, wherever these differ."""
    command, tokens = options.command, options.tokens
    if options.plot and command not in _PLOTTED:
        yield f"--plot with {command}", f"it with {' or '.join(_PLOTTED)}"
    if len(tokens) > 1 and command != "scaling":
        yield f"{len(tokens)} lengths for {command}", "one --tokens; scaling takes several"
    if len(set(tokens)) < len(tokens):
        yield f"--tokens {' '.join(map(str, tokens))}", "different lengths"
    if options.width % HEAD_DIM:
        yield f"--width {options.width}", f"a multiple of {HEAD_DIM}, the width of a head"
    if options.exact_rows % options.chunk:
        yield (
            f"--exact-rows {options.exact_rows} with --chunk {options.chunk}",
            "exact rows that are a multiple of the chunk",
        )
    if device == "cuda" and options.chunk % _TILE_ROWS:
        yield f"--chunk {options.chunk}", f"a multiple of {_TILE_ROWS}, the kernel's rows"
    if command == "calibrate" and tokens[0] <= options.exact_rows:
        yield (
            f"--tokens {tokens[0]} with --exact-rows {options.exact_rows}",
            "more tokens than are exact in any case",
        )
    if options.backend != "auto" and (reason := _no_backend(options.backend, device)):
        yield f"--backend {options.backend}", f"one that works here: {reason}"
    if options.memory_gib and device == "cpu":
        yield "--memory-gib on a CPU", "a CUDA device, whose memory torch can cap. Leave it out"
    elif options.memory_gib and options.memory_gib * 2**30 > probe(device).memory_bytes:
        has = probe(device).memory_bytes / 2**30
        yield f"--memory-gib {options.memory_gib:g}", f"at most the device's {has:.1f}"
    if options.install:
        yield from _install_objections(options, device, guard_file)


def _install_objections(
    options: argparse.Namespace, device: str, guard_file: Path
) -> Iterator[tuple[str, str]]:
    """What a threshold for everybody must have been measured with."""
    if options.command != "calibrate":
        yield f"--install with {options.command}", "it with calibrate"
        return
    least = TOKENS["calibrate"]
    if device == "cpu":
        yield "--install on a CPU", "a GPU, whose kernels the threshold is for. Leave it out"
    if options.tokens[0] < least:
        yield f"--install with --tokens {options.tokens[0]}", f"at least {least}, the default"
    for name, default in (
        ("width", CASES[14].d_model),
        ("exact_rows", EXACT_ROWS),
        ("chunk", CHUNK),
    ):
        if getattr(options, name) != default:
            option = name.replace("_", "-")
            yield f"--install with --{option} {getattr(options, name)}", f"the default {default}"
    if len(set(options.factors)) < CURVE_POINTS:
        given = f"--install with {len(set(options.factors))} --factors"
        yield given, f"at least {CURVE_POINTS} different ones, dense where the budget is crossed"
    if not os.access(guard_file, os.W_OK):
        yield f"--install into {guard_file}", "a file that may be written"


def _no_backend(name: str, device: str) -> str:
    """Why exact attention cannot run by that backend here, or ""."""
    if device == "cpu":
        return "a CPU has auto alone"
    q = torch.zeros(1, 2 * _TILE_ROWS, HEAD_DIM, dtype=torch.float16, device=device)
    try:
        exact_attention(q, q, q, name)
    except NoFusedAttentionError as error:
        return str(error)
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fastlayer.extreme")
    add = parser.add_argument
    add("command", choices=COMMANDS)
    add("--tokens", type=size, nargs="+", default=None, help="sequence length(s)")
    add("--batch", type=size, default=CASES[14].batch_size)
    add("--width", type=size, default=CASES[14].d_model, help=f"heads are {HEAD_DIM} wide")
    add("--attention", choices=ATTENTION_NAMES, default="guarded")
    add("--backend", choices=BACKEND_NAMES, default="auto", help="of exact attention")
    add("--exact-rows", type=size, default=EXACT_ROWS)
    add("--chunk", type=size, default=CHUNK)
    add("--trials", type=size, default=5)
    add("--repeats", type=size, default=3)
    add("--factors", type=positive, nargs="+", default=list(FACTORS), help="of calibrate")
    add("--memory-gib", type=positive, default=None, help="cap of device memory")
    add("--out", type=writable, default=None, metavar="FILE")
    add("--plot", type=picture, default=None, metavar="FILE", help="of calibrate, scaling")
    add("--install", action="store_true", help="make it the package's threshold")
    return parser

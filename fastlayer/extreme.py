"""Measurements of case 14 that no ordinary benchmark makes; each prints JSON, and may write it.

    python -m fastlayer.extreme calibrate --out baselines/polynomial_guard.json --install
    python -m fastlayer.extreme accuracy  --trials 5     # every element against the oracle
    python -m fastlayer.extreme time      --attention exact
    python -m fastlayer.extreme stream    --memory-gib 15
    python -m fastlayer.extreme scaling   --tokens 12500 25000 50000 100000 200000 --plot FILE

``calibrate`` scales the query projection, so that scores spread from 0.2 to 1.2, and compares the
whole model with the oracle: the guard's threshold is the spread where the worst element reaches
``CALIBRATED_BUDGET``. ``--install`` makes it the package's, if measured at case 14's width on a GPU
over at least as many tokens as ``calibrate`` takes by default. All run on the first CUDA device,
or, with shapes reduced by the options, on a CPU. Status 1: elements failed, or the curve supports
no threshold; status 2: the arguments do not fit, and nothing was measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fastlayer.cases import CASES
from fastlayer.config import TransformerConfig
from fastlayer.device import probe
from fastlayer.errors import ConfigError, FastlayerError
from fastlayer.extreme_options import FACTORS, HEAD_DIM, parse
from fastlayer.inputs import BASE_SEED, make_inputs
from fastlayer.model import FastTransformer
from fastlayer.oracle import Oracle
from fastlayer.polynomial import (
    ATOL,
    CALIBRATED_BUDGET,
    COEFFICIENTS,
    RTOL,
    Guard,
    calibrated_threshold,
    committed_guard,
)
from fastlayer.reference import ReferenceTransformer
from fastlayer.routes import Launch
from fastlayer.routes.prefix_body import Tally
from fastlayer.routes.prefix_stream import PrefixStream
from fastlayer.streaming import stream

Json = dict[str, Any]


def make_model(config: TransformerConfig, device: str, factor: float = 1.0) -> ReferenceTransformer:
    """The disclosed weights, with queries ``factor`` times as large."""
    torch.manual_seed(BASE_SEED)
    model = ReferenceTransformer(config).eval().requires_grad_(False)
    for layer in model.layers:
        layer.attention.q_proj.weight.mul_(factor)  # type: ignore[operator, union-attr]
        layer.attention.q_proj.bias.mul_(factor)  # type: ignore[operator, union-attr]
    return model.to(device)


def make_runner(
    model: ReferenceTransformer, x: torch.Tensor, launch: Launch, guard: Guard | None = None
) -> Callable[[torch.Tensor], tuple[torch.Tensor, Tally]]:
    """``prefix_stream`` on inputs of x's shape, whatever their length, with its tally."""
    fast = FastTransformer.from_reference(model, working_set_bytes=4 * 2**30)
    state = fast._own_runtime().state
    state.refresh()
    contract = fast._contract(x, fast._mask_kind(x, None, fast._own_runtime()), compiling=False)
    bound = PrefixStream(state, contract, launch, guard)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, Tally]:
        tally = bound.body.tally()
        out = torch.empty_like(x)
        for index, sample in enumerate(x):

            def load(target: torch.Tensor, sample: torch.Tensor = sample) -> object:
                return target.copy_(sample)

            bound.body(load, out[index], tally)
        return out, tally

    return run


def compare(candidate: torch.Tensor, expected: torch.Tensor) -> Json:
    """Elements, failures and the worst budget of ``[n, d]`` against ``[n, d]``, in row blocks."""
    failed, worst = 0, 0.0
    squares = 0.0
    for ours, theirs in zip(candidate.split(8192), expected.split(8192), strict=True):
        difference = (ours.double() - theirs.double()).abs()
        share = difference / (RTOL * theirs.double().abs()).clamp_min(ATOL)
        share = torch.nan_to_num(share, nan=math.inf, posinf=math.inf)
        failed += int((share > 1.0).sum())
        worst = max(worst, float(share.max()))
        squares += float(torch.nan_to_num(difference).square().sum())
    total = candidate.numel()
    return {
        "total": total,
        "failed": failed,
        "budget_used": worst if math.isfinite(worst) else None,
        "rms": math.sqrt(squares / total),
    }


def calibrate(
    config: TransformerConfig, device: str, launch: Launch, factors: tuple[float, ...] = FACTORS
) -> Json:
    """The curve: for each factor, the spread, and budgets of exact and every polynomial."""
    points: list[Json] = []
    for factor in factors:
        model = make_model(config, device, factor)
        x, _ = make_inputs(config, BASE_SEED, device)
        expected = Oracle(model)(x)
        point: Json = {"factor": factor}
        for name, changes in (
            ("exact", {"attention": "exact"}),
            *((kind, {"attention": "polynomial", "coefficients": kind}) for kind in COEFFICIENTS),
        ):
            result, tally = make_runner(model, x, {**launch, **changes})(x)
            point[name] = compare(result[0], expected[0])
            if name == "rows":
                if tally.layers["exact"]:
                    raise ConfigError("seq_len", config.seq_len, f"nothing ran: {tally.text()}")
                point |= {"sigma": tally.sigma, "mean": tally.mean, "row_budget": tally.row_budget}
        print(json.dumps(point), file=sys.stderr, flush=True)
        points.append(point)
    return {"workload": config.label(), "budget": CALIBRATED_BUDGET, "points": points}


def guard_data(curve: Json, device: str, evidence: str) -> Json:
    """What ``polynomial_guard.json`` holds for a measured curve; failed elements end it.

    Raises:
        ValueError: the curve supports no threshold, see ``calibrated_threshold``.
    """
    budgets = [(point["sigma"], point["rows"]["budget_used"]) for point in curve["points"]]
    rows = [(sigma, 1e9 if budget is None else budget) for sigma, budget in budgets]
    threshold = math.floor(calibrated_threshold(rows) * 1000) / 1000
    return {
        "curve": sorted(rows),
        "device": device,
        "evidence": evidence,
        "provenance": "calibrated",
        "threshold": threshold,
    }


def plot(found: Json, path: Path) -> None:
    """The picture of a calibration's or a scaling's result, as SVG or whatever the name says.

    A calibration's is budget against spread, a scaling's seconds against tokens; one line for each
    kind of attention. The same numbers make the same file. Needs matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "fastlayer", "svg.fonttype": "none"}):
        figure, axes = pyplot.subplots(figsize=(7, 4.5))
        if "budget" in found:
            points = sorted(found["points"], key=lambda point: point["sigma"])
            for name in ("exact", *COEFFICIENTS):
                pairs = [(p["sigma"], p[name]["budget_used"]) for p in points]
                axes.plot(*zip(*pairs, strict=True), marker="o", label=name)
            axes.axhline(found["budget"], linestyle="--", color="grey", label="threshold's budget")
            axes.set(xlabel="worst score spread", ylabel="budget of the worst element")
            axes.set(yscale="log", title=found["workload"])
        else:
            for name, line in sorted(found["attention"].items()):
                pairs = [(p["tokens"], p["seconds"]) for p in line["points"]]
                grows = f"{name}, exponent {line['exponent']:.2f}" if line["exponent"] else name
                axes.plot(*zip(*pairs, strict=True), marker="o", label=grows)
            axes.set(xlabel="tokens of one sample", ylabel="seconds of a forward")
            axes.set(xscale="log", yscale="log", title=found["device"])
        axes.legend()
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def accuracy(config: TransformerConfig, device: str, launch: Launch, trials: int) -> Json:
    """Every element of ``trials`` inputs against the oracle, sample by sample."""
    model = make_model(config, device)
    oracle = Oracle(model)
    total: Json = {"trials": trials, "total": 0, "failed": 0, "budget_used": 0.0, "notes": []}
    one = replace(config, batch_size=1)
    for trial in range(trials):
        x, _ = make_inputs(config, BASE_SEED + trial, device)
        run = make_runner(model, x, launch)
        for index in range(len(x)):
            result, tally = run(x[index : index + 1])
            found = compare(result[0], oracle(x[index : index + 1])[0])
            total["total"] += found["total"]
            total["failed"] += found["failed"]
            budget = found["budget_used"]
            worst = total["budget_used"]
            total["budget_used"] = None if budget is None or worst is None else max(worst, budget)
        total["notes"].append(tally.text())
    return total | {"workload": config.label(), "sample": one.label()}


def timed(body: Callable[[], object], device: str, repeats: int) -> float:
    """Median seconds of ``body``, after one run to warm up."""
    body()
    seconds = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        body()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2]


def resident(config: TransformerConfig, device: str, launch: Launch, repeats: int) -> Json:
    """Seconds of one forward with input and output on the device, and memory above them."""
    model = make_model(config, device)
    x, _ = make_inputs(config, BASE_SEED, device)
    run = make_runner(model, x, launch)
    notes: list[str] = []

    def body() -> None:
        notes[:] = [run(x)[1].text()]

    before = 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    seconds = timed(body, device, repeats)
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else None
    output = config.activation_bytes()
    return {
        "workload": config.label(),
        "seconds": seconds,
        "workspace_bytes": None if peak is None else peak - output,
        "notes": notes,
    }


def streamed(config: TransformerConfig, device: str, launch: Launch, repeats: int) -> Json:
    """Seconds of streaming the batch from host memory (pinned on CUDA; four samples in turn)."""
    model = FastTransformer.from_reference(make_model(config, device))
    some = replace(config, batch_size=min(4, config.batch_size))
    host = list(make_inputs(some, BASE_SEED)[0])
    if device == "cuda":
        host = [row.pin_memory() for row in host]
    notes: list[str] = []

    def body() -> None:
        source = itertools.islice(itertools.cycle(host), config.batch_size)
        report = stream(model, source, lambda index, out: None, launch=launch)
        notes[:] = report.notes

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(body, device, repeats)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {
        "workload": config.label(),
        "seconds": seconds,
        "device_bytes": peak,
        "transferred_bytes": 2 * config.activation_bytes(),
        "transfer_seconds": transfer_seconds(host, config.batch_size, repeats),
        "notes": notes,
    }


def transfer_seconds(host: list[torch.Tensor], count: int, repeats: int) -> float | None:
    """Seconds in which ``count`` samples cross to the device and as many back, both ways at once.

    No stream can be faster than that. None where the samples are not pinned: nothing crosses.
    """
    if not host[0].is_pinned():
        return None
    there, result = (torch.empty_like(host[0], device="cuda") for _ in range(2))
    back = torch.empty_like(host[0], pin_memory=True)
    up, down = torch.cuda.Stream(), torch.cuda.Stream()

    def body() -> None:
        for index in range(count):
            with torch.cuda.stream(up):
                there.copy_(host[index % len(host)], non_blocking=True)
            with torch.cuda.stream(down):
                back.copy_(result, non_blocking=True)

    return timed(body, "cuda", repeats)


def scaling(
    config: TransformerConfig, device: str, launch: Launch, repeats: int, lengths: list[int]
) -> Json:
    """Seconds by length at batch one, and the exponent of a power law fitted to them.

    Of the attention that ``launch`` names, and of exact attention beside it.
    """
    lines: Json = {}
    for attention in dict.fromkeys((launch["attention"], "exact")):
        points = []
        for tokens in lengths:
            one = replace(config, batch_size=1, seq_len=tokens)
            found = resident(one, device, {**launch, "attention": attention}, repeats)
            points.append({"tokens": tokens, **found})
        fitted = exponent([(p["tokens"], p["seconds"]) for p in points])
        lines[str(attention)] = {"points": points, "exponent": fitted}
    return {"attention": lines}


def exponent(points: list[tuple[float, float]]) -> float | None:
    """Least-squares slope of log seconds over log tokens; None for fewer than two points."""
    if len(points) < 2:
        return None
    logs = [(math.log(a), math.log(b)) for a, b in points]
    mean = [sum(axis) / len(logs) for axis in zip(*logs, strict=True)]
    above = sum((a - mean[0]) * (b - mean[1]) for a, b in logs)
    return float(above / sum((a - mean[0]) ** 2 for a, _ in logs))


def main(arguments: list[str] | None = None) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = parse(arguments, device, _guard_file())
    if options.memory_gib:
        whole = probe(device).memory_bytes
        torch.cuda.set_per_process_memory_fraction(options.memory_gib * 2**30 / whole)
    config = replace(
        CASES[14],
        batch_size=options.batch,
        seq_len=options.tokens[0],
        d_model=options.width,
        num_heads=options.width // HEAD_DIM,
        ffn_dim=options.width,
    )
    launch: Launch = {
        "compute": "float16",
        "attention": options.attention,
        "backend": options.backend,
        "exact_rows": options.exact_rows,
        "chunk": options.chunk,
    }
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.no_grad():
            found = _COMMANDS[options.command](config, device, launch, options)
    except (FastlayerError, ValueError) as error:  # what does not fit, or a launch that cannot be
        print(f"{options.command}: {error}", file=sys.stderr)
        return 1
    finally:
        torch.set_float32_matmul_precision(before)
    found |= {
        "device": probe(device).name,
        **({"memory_gib": options.memory_gib} if options.memory_gib else {}),
        "torch": torch.__version__,
        "launch": dict(launch),
        "guard": committed_guard().provenance,
    }
    text = json.dumps(found, indent=1, sort_keys=True, allow_nan=False)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    if options.plot:
        plot(found, options.plot)
    if options.command == "calibrate":
        return _install(found, options)
    if found.get("failed"):
        print(f"{found['failed']} of {found['total']} elements failed", file=sys.stderr)
        return 1
    return 0


def _install(found: Json, options: argparse.Namespace) -> int:
    evidence = str(options.out or "not recorded")
    try:
        data = guard_data(found, found["device"], evidence)
    except ValueError as error:
        print(f"no threshold: {error}", file=sys.stderr)
        return 1
    print(f"threshold {data['threshold']}", file=sys.stderr)
    if options.install:
        _guard_file().write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")
    return 0


def _guard_file() -> Path:
    return Path(__file__).with_name("polynomial_guard.json")


_COMMANDS: dict[str, Callable[[TransformerConfig, str, Launch, argparse.Namespace], Json]] = {
    "calibrate": lambda c, d, launch, o: calibrate(
        replace(c, batch_size=1), d, launch, tuple(o.factors)
    ),
    "accuracy": lambda c, d, launch, o: accuracy(c, d, launch, o.trials),
    "time": lambda c, d, launch, o: resident(c, d, launch, o.repeats),
    "stream": lambda c, d, launch, o: streamed(c, d, launch, o.repeats),
    "scaling": lambda c, d, launch, o: scaling(c, d, launch, o.repeats, o.tokens),
}


if __name__ == "__main__":
    sys.exit(main())

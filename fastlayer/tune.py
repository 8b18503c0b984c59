"""Searches launches of the fused kernels for one case, and proposes rows for the launch table.

    python -m fastlayer.tune --case 13
    python -m fastlayer.tune --case 13 --form layers        # one kernel form only
    python -m fastlayer.tune --case 13 --capability 120     # without a GPU: what would fit

Every launch of ``SPACE`` that can compute the case is compiled for the capability and pruned by
what it takes. On a machine with a CUDA device the rest then prove themselves in processes of their
own, with poisoned outputs, and those that pass are timed in turn, round after round, so that a
drifting clock meets them all. Nothing here runs at import or in a user's call, and nothing is
written but the log: a row enters ``kernels.launches`` by hand, and a launch runs by admission.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fastlayer.cases import CASES
from fastlayer.config import TransformerConfig
from fastlayer.kernels.knobs import Form, Launch, sizes_for
from fastlayer.kernels.launches import CAPABILITIES, candidates

#: Values tried of each knob, by form; see ``kernels.knobs.Launch``.
SPACE: dict[Form, dict[str, tuple[Any, ...]]] = {
    "single": {"rows": (64, 128), "warps": (4, 8), "stages": (2, 3), "chunk": (64, 128)},
    "wavefront": {
        "rows": (32, 64),
        "keys": (64, 128),
        "qkv_chunk": (64, 128),
        "chunk": (64, 128),
        "stages": (2, 3),
    },
    "layers": {
        "rows": (64, 128),
        "keys": (64, 128),
        "warps": (4, 8),
        "qkv_chunk": (64, 128),
        "chunk": (32, 64),
        "stages": (2, 3),
        "attention_stages": (3,),
        "max_registers": (0, 168),
    },
    "strips": {
        "rows": (16, 32),
        "warps": (4, 8),
        "chunk": (64, 128),
        "early": (True, False),
        "passes": (1, 2),
    },
}

#: More stack than this a thread has always been slower than another launch without it.
MOST_STACK = 320

_ROUNDS = 15
_BLOCK_S = 0.004
_SETTLE_S = 0.12


@dataclass(slots=True)
class Trial:
    """One launch and what became of it. ``refused`` is "" while nothing speaks against it."""

    launch: Launch
    refused: str = ""
    resources: list[dict[str, int]] = field(default_factory=list)
    milliseconds: float = math.nan

    def as_dict(self) -> dict[str, Any]:
        known = None if math.isnan(self.milliseconds) else self.milliseconds
        return {
            "launch": self.launch.as_dict(),
            "refused": self.refused,
            "resources": self.resources,
            "milliseconds": known,
        }


def space(config: TransformerConfig, forms: Collection[str] = tuple(SPACE)) -> Iterator[Launch]:
    """The launches of ``SPACE`` that have one of ``forms`` and can compute ``config``."""
    for form, knobs in SPACE.items():
        if form not in forms:
            continue
        for values in itertools.product(*knobs.values()):
            launch = Launch(form, **dict(zip(knobs, values, strict=True)))
            if not launch.objections(sizes_for(launch, config)):
                yield launch


def verdict(resources: Sequence[dict[str, int]], shared_limit: int) -> str:
    """Why kernels that take ``resources`` are not worth running, or ""."""
    shared = max(item["shared"] for item in resources)
    if shared > shared_limit:
        return f"{shared:,} bytes of shared memory exceed {shared_limit:,}"
    stack = max(item["stack"] for item in resources)
    if stack > MOST_STACK:
        return f"{stack} bytes of stack a thread exceed {MOST_STACK}"
    return ""


def compile_launch(
    launch: Launch, config: TransformerConfig, maximum: bool, capability: int
) -> list[dict[str, int]]:
    """What each distinct kernel of a launch takes on ``capability``, e.g. 90."""
    from fastlayer.kernels.compile import compile_step, hollow_program, resources

    steps = hollow_program(launch, config, maximum=maximum).steps
    distinct = {json.dumps(step.constants, sort_keys=True): step for step in steps}
    return [asdict(resources(compile_step(step, capability))) for step in distinct.values()]


def prune(
    trials: Sequence[Trial], compiled: Callable[[Launch], list[dict[str, int]]], limit: int
) -> None:
    """Fills in the resources of each trial and refuses those that do not fit or spill much."""
    with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(compiled, trial.launch) for trial in trials]
        for trial, future in zip(trials, futures, strict=True):
            try:
                trial.resources = future.result()
            except RuntimeError as error:
                trial.refused = f"it does not compile: {str(error).strip().splitlines()[-1]}"
            else:
                trial.refused = verdict(trial.resources, limit)


def proposal(case: int, trials: Sequence[Trial]) -> list[str]:
    """Rows for ``kernels.launches``: the fastest and what lies within 3% of it, at most two."""
    timed = sorted(
        (trial for trial in trials if not math.isnan(trial.milliseconds)),
        key=lambda trial: trial.milliseconds,
    )
    near = [trial for trial in timed if trial.milliseconds <= 1.03 * timed[0].milliseconds]
    return [
        f"{case}: Row(Launch({', '.join(_arguments(trial.launch))}), "
        f'"{trial.milliseconds:.4f} ms"),'
        for trial in near[:2]
    ]


def _arguments(launch: Launch) -> list[str]:
    values = launch.as_dict()
    return [repr(values.pop("form")), *(f"{key}={value!r}" for key, value in values.items())]


def _prove(
    trials: Sequence[Trial], config: TransformerConfig, keeps_maximum: Callable[[Launch], bool]
) -> None:
    import torch

    from fastlayer.kernels.proof import Claim, refusal

    index = torch.cuda.current_device()
    facts = torch.cuda.get_device_properties(index)
    capability = (facts.major, facts.minor)

    def proven(trial: Trial) -> str:
        maximum = keeps_maximum(trial.launch)
        return refusal(Claim(trial.launch, config, False, maximum, index, facts.name, capability))

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 2)) as pool:
        for trial, reason in zip(trials, pool.map(proven, trials), strict=True):
            trial.refused = reason


def _time(trials: Sequence[Trial], config: TransformerConfig) -> None:
    """Median milliseconds of a replayed graph for each trial, all in turn in every round."""
    import time

    import torch

    from fastlayer.kernels.launch import program
    from fastlayer.kernels.packing import pack
    from fastlayer.reference import ReferenceTransformer

    torch.manual_seed(1234)
    state = {k: v.cuda() for k, v in ReferenceTransformer(config).state_dict().items()}
    x = torch.randn(config.batch_size, config.seq_len, config.d_model, device="cuda")
    out = torch.empty_like(x)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graphs, samples = [], [[] for _ in trials]  # type: ignore[var-annotated]
    for trial in trials:
        weights = pack(state, sizes_for(trial.launch, config))
        run = program(trial.launch, config, weights, masked=False, device="cuda")
        run(x, out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(x, out)
        graphs.append((graph, run))

    def block(graph: torch.cuda.CUDAGraph, replays: int) -> float:
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / replays

    until = time.perf_counter() + _SETTLE_S * max(1, len(graphs))
    while time.perf_counter() < until:
        for graph, _ in graphs:
            block(graph, 10)
    for _ in range(_ROUNDS):
        for (graph, _), taken in zip(graphs, samples, strict=True):
            taken.append(block(graph, max(1, int(_BLOCK_S * 1e3 / block(graph, 1)))))
    for trial, taken in zip(trials, samples, strict=True):
        trial.milliseconds = statistics.median(taken)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    served = [case for case, config in CASES.items() if candidates(config, (9, 0), 132)]
    parser = argparse.ArgumentParser(prog="python -m fastlayer.tune")
    parser.add_argument("--case", type=int, choices=served, required=True)
    parser.add_argument(
        "--capability",
        type=int,
        choices=CAPABILITIES,
        help="compile for this one; the present device's where left out",
    )
    parser.add_argument(
        "--form", choices=list(SPACE), nargs="+", default=list(SPACE), help="all where left out"
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="write every trial as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    import torch

    from fastlayer.kernels.packing import pack
    from fastlayer.kernels.resources import SHARED_LIMITS
    from fastlayer.reference import ReferenceTransformer

    present = None
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        present = 10 * major + minor
    capability = options.capability or present
    if capability not in SHARED_LIMITS:
        known = ", ".join(map(str, SHARED_LIMITS))
        print(f"no capability to compile for ({capability}); pass --capability, one of {known}")
        return 2

    config = CASES[options.case]
    trials = [Trial(launch) for launch in space(config, options.form)]
    if not trials:
        print(f"no launch of form {', '.join(options.form)} can compute {config.label()}")
        return 2
    torch.manual_seed(1234)
    state = ReferenceTransformer(config).state_dict()
    bounds = pack(state, sizes_for(trials[0].launch, config)).score_bounds
    print(f"case {options.case}: {config.label()}, sm_{capability}, {len(trials)} launches")

    jobs = max(1, os.cpu_count() or 1)

    def keeps_maximum(launch: Launch) -> bool:
        return launch.keeps_maximum(bounds, sizes_for(launch, config))

    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as workers:

        def compiled(launch: Launch) -> list[dict[str, int]]:
            maximum = keeps_maximum(launch)
            return workers.submit(compile_launch, launch, config, maximum, capability).result()

        prune(trials, compiled, SHARED_LIMITS[capability])
    left = [trial for trial in trials if not trial.refused]
    timed = capability == present
    if timed:
        _prove(left, config, keeps_maximum)
        left = [trial for trial in left if not trial.refused]
        _time(left, config)

    for trial in sorted(trials, key=lambda trial: (trial.refused != "", trial.milliseconds)):
        took = "" if math.isnan(trial.milliseconds) else f"{trial.milliseconds:.4f} ms "
        print(f"{took}{trial.launch.as_dict()} {trial.resources} {trial.refused}")
    if options.log:
        rows = [trial.as_dict() for trial in trials]
        log = {"case": options.case, "capability": capability, "trials": rows}
        options.log.write_text(json.dumps(log, indent=1, sort_keys=True) + "\n")
    if timed:
        print("\n".join(proposal(options.case, trials)))
    else:
        print(f"{len(left)} launches are worth a run; no sm_{capability} device here to time them")
    return 0 if left else 1


if __name__ == "__main__":
    sys.exit(main())

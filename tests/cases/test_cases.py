"""The fourteen disclosed cases, gated with nothing but what any project could use.

Without ``--fastlayer-bench`` each shape is checked at a small batch; with it, at its full size,
timed, and held against the stored baseline.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from grid import stress_grid
from rivals import rivals

from fastlayer import CASES, Admissions, FastTransformer, ReferenceTransformer, TransformerConfig
from fastlayer.admissions import committed
from fastlayer.contract import GIB, Precision, RuntimeContract
from fastlayer.device import free_bytes, probe
from fastlayer.inputs import BASE_SEED, make_inputs
from fastlayer.oracle import Oracle
from fastlayer.routes import eligible_routes, launches
from pytest_fastlayer import freeze

#: Batch of a check that is not a benchmark: enough for every path, quick on two cores.
CHECK_BATCH = 2
#: Batch at which a reference too slow to run whole is priced.
PRICING_BATCH = 8
#: Room for the oracle's blocks of scores: wide ones keep a large GPU's matrix units busy.
ORACLE_WORKSPACE = 16 * GIB
#: Activations alive at once while an oracle's case is judged: the input, fresh contents for it, and
#: outputs of both arms that are compared or kept.
ORACLE_ACTIVATIONS = 6


def label(case_id: int, config: TransformerConfig) -> str:
    shape = f"{config.batch_size}x{config.seq_len}x{config.d_model}"
    return f"case {case_id} [{shape} H{config.num_heads} L{config.num_layers}]"


def workload(config: TransformerConfig) -> dict[str, Any]:
    """What must agree before two measurements of a case may be compared."""
    names = ("batch_size", "seq_len", "d_model", "num_heads", "ffn_dim", "num_layers", "causal")
    return {name: getattr(config, name) for name in names} | {
        "dtype": "float32",
        "padding_ratio": 0.0,
        "input_scale": 1.0,
    }


def work(config: TransformerConfig) -> dict[str, float]:
    """The minimal algorithm's operations and bytes, float32 at both ends, for the roofline."""
    return {"flops": config.minimal_flops, "bytes": config.minimal_bytes()}


def inputs(config: TransformerConfig, device: str, seed: int) -> tuple[Any, ...]:
    x, mask = make_inputs(config, seed, device)
    return (x,) if mask is None else (x, mask)


def too_large(config: TransformerConfig, device: str) -> str | None:
    """The bytes that rule the dense reference out, or None."""
    needed = config.dense_bytes() + 2 * config.activation_bytes()
    free = free_bytes(torch.device(device))
    if needed <= free:
        return None
    return (
        f"the dense reference needs {needed / 1e9:,.1f} GB, of them "
        f"{config.score_bytes() / 1e9:,.1f} GB for one layer's float32 scores; "
        f"{free / 1e9:,.1f} GB are free"
    )


def no_oracle(config: TransformerConfig, device: str) -> str | None:
    """Why the reference in linear memory is no way out here either, or None."""
    if device == "cpu":
        return f"and a CPU is too slow for its oracle: {config.flops / 1e12:,.0f} TFLOP a forward"
    needed = ORACLE_ACTIVATIONS * config.activation_bytes() + ORACLE_WORKSPACE
    free = free_bytes(torch.device(device))
    if needed <= free:
        return None
    return f"judging it by its oracle takes {needed / 1e9:,.1f} GB (fastlayer.stream needs less)"


def too_slow(
    reference_class: type, config: TransformerConfig, device: str, limit_s: float
) -> str | None:
    """The seconds that rule a large batch out on a CPU, priced on a slice of it, or None."""
    if device != "cpu" or config.batch_size <= 16 * PRICING_BATCH:
        return None
    small = replace(config, batch_size=PRICING_BATCH)
    model = reference_class(small).eval()
    args = inputs(small, device, BASE_SEED)
    with torch.no_grad():
        model(*args)
        start = time.perf_counter()
        model(*args)
        forward_s = (time.perf_counter() - start) * config.batch_size / PRICING_BATCH
    # An accuracy trial, the probes, six pairs and their control: eight forwards of the reference
    # and some two dozen of the candidate, taken at a third of the reference's time.
    needed_s = 16 * forward_s
    if needed_s <= limit_s:
        return None
    return (
        f"one dense forward would take about {forward_s:,.0f} s here, the shortest run "
        f"{needed_s:,.0f} s of the {limit_s:,.0f} s a case may take (--fastlayer-max-case)"
    )


def build(reference: torch.nn.Module, config: TransformerConfig, **options: Any) -> FastTransformer:
    model = FastTransformer(config, **options)
    model.load_state_dict(reference.state_dict(), strict=True)
    return model.to(next(reference.parameters()).device).eval()


def policy(device: str, case_id: int, dense_fits: bool) -> str:
    """Strict wherever evidence exists for this device, else the first eligible route.

    Where dense arithmetic does not fit, strict would refuse a case before it was ever measured:
    there it takes evidence for the case itself.
    """
    name = probe(torch.device(device)).name
    rows: Admissions = committed()
    known = [row.case for row in rows.admitted if row.device == name]
    return "strict" if (case_id in known if not dense_fits else known) else "eligible"


def describe(model: FastTransformer) -> Mapping[str, Any]:
    """Route, launch, objections and notes of what ran, for the record."""
    decision = model.last_decision
    assert decision is not None
    return {
        "route": decision.route,
        "launch": dict(decision.launch) or None,
        "objections": {name: list(reasons) for name, reasons in decision.rejected},
        "notes": list(decision.notes),
    }


def variants(
    reference: torch.nn.Module, config: TransformerConfig, device: str
) -> dict[str, Callable[[], FastTransformer]]:
    """Every eligible route in every launch worth measuring, for ``--fastlayer-admit``.

    Without ``dense``, which is the reference and would be timed against itself.
    """
    contract = RuntimeContract(
        config=config,
        device=probe(torch.device(device)),
        precision=Precision("high", device == "cuda"),
    )
    return {
        " ".join([route, *(f"{key}={value}" for key, value in launch.items())]): partial(
            build, reference, config, route=route, launch=launch
        )
        for route in eligible_routes(contract)
        if route != "dense"
        for launch in launches(route, contract)
    }


@pytest.mark.parametrize("case_id", [pytest.param(i, id=f"case_{i}") for i in CASES])
def test_case(case_id, paired):
    config = CASES[case_id]
    name, device = str(case_id), paired.device
    facts = {"label": label(case_id, config), "workload": workload(config)}
    crowded = too_large(config, device)
    if crowded and (refusal := no_oracle(config, device)):
        paired.unsupported(name, f"{crowded}; {refusal}", **facts)
    reference_class = paired.reference_class(ReferenceTransformer)
    if not paired.bench:
        config = replace(config, batch_size=min(config.batch_size, CHECK_BATCH))
    elif refusal := too_slow(reference_class, config, device, paired.max_case_s):
        paired.unsupported(name, refusal, **facts)
    torch.manual_seed(BASE_SEED)
    reference = reference_class(config).to(device).eval()
    judge = Oracle(reference, workspace_bytes=ORACLE_WORKSPACE) if crowded else reference
    paired(
        name,
        reference=freeze(judge, source=inspect.getfile(reference_class)),
        candidate=build(reference, config, policy=policy(device, case_id, not crowded)),
        inputs=partial(inputs, config, device),
        work=work(config),
        reference_kind="oracle" if crowded else "dense",
        describe=describe,
        rivals={} if crowded else rivals(reference, config, device),
        variants=variants(reference, config, device),
        stress=None if crowded else stress_grid(build, reference, config, device),
        **facts,
    )

"""The cases' stress grid runs what the full-size case ran, or says what it ran instead."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from grid import STRESS_BATCH, stress_grid
from test_cases import build

from fastlayer import CASES, ReferenceTransformer, make_inputs
from pytest_fastlayer.accuracy import Tolerance
from pytest_fastlayer.stress import run

CONFIG = replace(CASES[12], seq_len=16, batch_size=STRESS_BATCH + 1, num_layers=2)


@pytest.mark.parametrize(
    ("route", "ran"),
    [("sdpa", {"sdpa"}), ("dense", {"dense"}), ("fused", {"sdpa"})],
    ids=["as chosen", "dense", "a route that serves no CPU"],
)
def test_the_chosen_route_at_a_small_batch(route, ran):
    torch.manual_seed(1234)
    reference = ReferenceTransformer(CONFIG).eval()
    full = SimpleNamespace(last_decision=SimpleNamespace(route=route, launch={}))
    grid = stress_grid(build, reference, CONFIG, "cpu")
    assert grid.note == f"batch {STRESS_BATCH}"
    assert grid.arms is not None
    found = run(grid, *grid.arms(full), [1234], Tolerance(), lambda text: None)
    assert found.record.failed == 0
    assert {cell.route for cell in found.record.cells} == ran
    assert found.record.elements == 12 * STRESS_BATCH * 16 * CONFIG.d_model
    first, padded = grid.cells[1].inputs(1234), grid.cells[4].inputs(1234)
    assert (len(first), len(padded)) == (1, 2)
    assert first[0].equal(make_inputs(replace(CONFIG, batch_size=STRESS_BATCH), 1234)[0])

"""The cases' stress grid runs what the full-size case ran, or says what it ran instead."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import grid as grids
import pytest
import torch
from grid import stress_batch, stress_grid
from test_cases import build

from fastlayer import CASES, ReferenceTransformer, make_inputs
from pytest_fastlayer.accuracy import Tolerance
from pytest_fastlayer.stress import run

CONFIG = replace(CASES[12], seq_len=16, batch_size=8, num_layers=2)


class Spy:
    """An arm, and each call's mask and output."""

    def __init__(self, arm):
        self.arm = arm
        self.seen: list[tuple[torch.Tensor | None, torch.Tensor]] = []

    def __call__(self, x, mask=None):
        output = self.arm(x) if mask is None else self.arm(x, mask)
        self.seen.append((mask, output))
        return output

    def __getattr__(self, name):
        return getattr(self.arm, name)


@pytest.mark.parametrize("route", ["sdpa", "dense"])
def test_padding_reaches_both_arms(route):
    """The worst elements may sit in tokens that no padding touches: then every ratio of a seed
    shows the same figures, for attention is causal. So what is padded is looked at here."""
    torch.manual_seed(1234)
    reference = ReferenceTransformer(CONFIG).eval()
    full = SimpleNamespace(last_decision=SimpleNamespace(route=route, launch={}))
    grid = stress_grid(build, reference, CONFIG, "cpu")
    assert grid.arms is not None
    arms = [Spy(arm) for arm in grid.arms(full)]
    seeds = [1234, 1235]
    found = run(grid, *arms, seeds, Tolerance(), lambda text: None)
    assert found.record.failed == 0
    ratios = [
        cell.workload["padding_ratio"]
        for cell in (*found.record.cells, *found.record.ungated)
        for _ in seeds
    ]
    for arm in arms:
        assert len(arm.seen) == len(ratios)
        for ratio, (mask, output) in zip(ratios, arm.seen, strict=True):
            assert (mask is None) == (ratio == 0)
            if mask is None:
                assert (output != 0).any(-1).all()
                continue
            padded = (~mask).sum().item()
            assert 0 < padded <= ratio * mask.numel() + CONFIG.batch_size
            assert not output[~mask].any()
            assert (output[mask] != 0).any(-1).all()
    for (one, _), (other, _) in zip(*(arm.seen for arm in arms), strict=True):
        assert one is None or one.equal(other)
    # More is padded at a larger ratio, whatever the seed: the ratios are not one another's copies.
    counts: dict[float, int] = {}
    for ratio, (mask, _) in zip(ratios, arms[0].seen, strict=True):
        counts[ratio] = counts.get(ratio, 0) + (0 if mask is None else (~mask).sum().item())
    assert sorted(counts.values()) == [counts[ratio] for ratio in sorted(counts)]
    assert len(set(counts.values())) == len(counts)


def test_batches_of_the_disclosed_cases():
    """Whole where a forward is short; one and the same number of elements in all the others."""
    batches = {case: stress_batch(config) for case, config in CASES.items()}
    whole = {case for case, batch in batches.items() if batch == CASES[case].batch_size}
    assert whole == {1, 2, 3, 4, 7, 9, 10, 11, 12}
    assert {case: batches[case] for case in (5, 6, 8, 13)} == {5: 16, 6: 16, 8: 2, 13: 2}


@pytest.mark.parametrize(
    ("route", "ran"),
    [("sdpa", {"sdpa"}), ("dense", {"dense"}), ("fused", {"sdpa"})],
    ids=["as chosen", "dense", "a route that serves no CPU"],
)
def test_the_chosen_route_at_a_small_batch(route, ran, monkeypatch):
    monkeypatch.setattr(grids, "WHOLE_ELEMENTS", 0)
    monkeypatch.setattr(grids, "REDUCED_ELEMENTS", 4 * 16 * CONFIG.d_model)
    torch.manual_seed(1234)
    reference = ReferenceTransformer(CONFIG).eval()
    full = SimpleNamespace(last_decision=SimpleNamespace(route=route, launch={}))
    grid = stress_grid(build, reference, CONFIG, "cpu")
    assert grid.note == "batch 4"
    assert grid.arms is not None
    found = run(grid, *grid.arms(full), [1234], Tolerance(), lambda text: None)
    assert found.record.failed == 0
    assert {cell.route for cell in found.record.cells} == ran
    assert found.record.elements == 12 * 4 * 16 * CONFIG.d_model
    first, padded = grid.cells[1].inputs(1234), grid.cells[4].inputs(1234)
    assert (len(first), len(padded)) == (1, 2)
    assert first[0].equal(make_inputs(replace(CONFIG, batch_size=4), 1234)[0])

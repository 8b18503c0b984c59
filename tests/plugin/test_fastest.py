"""Which variant ``--fastlayer-admit`` takes: the one that is fastest beside the others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pytest_fastlayer import freeze, measurement
from pytest_fastlayer.pairing import arms
from pytest_fastlayer.pairing.pair import Pair
from pytest_fastlayer.records import Verdict

#: Case 11 on an H200: the host of the eager reference was slow while the first was timed.
TILES_TWO = ("two stages", 104.1e-6, 24.86)
TILES = ("three stages", 93.5e-6, 20.02)


def arm(name, candidate_s, ratio, verdict=Verdict.PASS):
    timing = SimpleNamespace(candidate_s=candidate_s, ci=(ratio, ratio * 1.1))
    return SimpleNamespace(name=name, verdict=verdict, timing=timing)


class Terms:
    """Of a run that measures nothing."""

    settings = SimpleNamespace()

    def __init__(self):
        self.told = []

    def progress(self, text):
        self.told.append(text)

    def schedule(self, device, kind):
        return SimpleNamespace(screening=lambda effort: effort)

    def policy(self):
        return None


@pytest.fixture
def chosen(monkeypatch):
    """``chosen(arms, head_to_head)``: the name taken, and the pairs of names that were timed.

    ``head_to_head(challenger, champion)`` gives the interval's lower end, or raises.
    """

    def run(given, head_to_head):
        timed = []

        def measure(champion, challenger, *_):
            timed.append((challenger.name, champion.name))
            low = head_to_head(challenger.name, champion.name)
            return SimpleNamespace(ci=None if low is None else (low, 2.0)), ()

        def make(name):
            def variant(x):
                return x

            variant.name = name
            return variant

        monkeypatch.setattr(measurement, "measure", measure)
        own = make("own")
        pair = Pair(
            name="p",
            reference=freeze(torch.nn.Identity()),
            candidate=own,
            inputs=lambda seed: (torch.ones(1),),
            variants={each.name: (lambda name=each.name: make(name)) for each in given},
        )
        found = arms.with_fastest(pair, Terms(), given, torch.device("cpu"))
        return found.candidate.name, timed

    return run


def test_a_slow_reference_makes_no_variant_fast(chosen):
    name, timed = chosen([arm(*TILES_TWO), arm(*TILES)], lambda *_: 0.88)
    assert name == "three stages"
    assert timed == [("two stages", "three stages")]


def test_near_ones_are_decided_side_by_side(chosen):
    given = [arm("a", 1.00, 2.0), arm("b", 1.02, 2.0), arm("c", 1.2, 2.0), arm("far", 1.3, 9.0)]
    name, timed = chosen(given, lambda challenger, champion: 1.01 if challenger == "b" else 0.9)
    assert name == "b"
    assert timed == [("b", "a"), ("c", "b")]


@pytest.mark.parametrize("low", [0.99, 1.0, None, RuntimeError("tired")])
def test_what_leads_stays_unless_it_is_beaten_for_certain(chosen, low):
    def head_to_head(*_):
        if isinstance(low, Exception):
            raise low
        return low

    assert chosen([arm("a", 1.0, 2.0), arm("b", 1.1, 3.0)], head_to_head)[0] == "a"


def test_only_what_passed_is_taken(chosen):
    refused = arm("wrong", 0.5, 9.0, Verdict.INCORRECT)
    assert chosen([refused, arm("right", 1.0, 2.0)], None) == ("right", [])
    assert chosen([refused], None) == ("own", [])

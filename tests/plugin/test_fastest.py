"""Which variant ``--fastlayer-admit`` takes: the one that is fastest beside the others."""

from __future__ import annotations

import weakref
from functools import partial
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


def built(name):
    """A variant of that name, which can be told from another and can be seen to go."""

    def variant(x):
        return x

    variant.name = name
    return variant


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
def said():
    """Notes of the pair's candidate."""
    return []


@pytest.fixture
def chosen(monkeypatch, said):
    """``chosen(arms, head_to_head)``: the name taken, and the pairs of names that were timed.

    ``head_to_head(challenger, champion)`` gives the interval's lower end, or raises.
    """

    def run(given, head_to_head, make=built):
        timed = []

        def measure(champion, challenger, *_):
            timed.append((challenger.name, champion.name))
            low = head_to_head(challenger.name, champion.name)
            return SimpleNamespace(ci=None if low is None else (low, 2.0)), ()

        monkeypatch.setattr(measurement, "measure", measure)
        pair = Pair(
            name="p",
            reference=freeze(torch.nn.Identity()),
            candidate=built("own"),
            inputs=lambda seed: (torch.ones(1),),
            variants={each.name: partial(make, each.name) for each in given},
        )
        found = arms.with_fastest(pair, Terms(), given, torch.device("cpu"))
        said.extend(() if found.describe is None else found.describe(None)["notes"])
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


def test_the_record_names_the_variant(chosen, said):
    chosen([arm("a", 1.0, 2.0)], None)
    assert said == ["--fastlayer-admit took variant a for the candidate"]
    said.clear()
    chosen([arm("a", 1.0, 2.0, Verdict.INCORRECT)], None)
    assert said == []


@pytest.mark.parametrize(
    ("describe", "expected"),
    [
        (lambda _: {"route": "r", "notes": ("own",)}, {"route": "r", "notes": ["more", "own"]}),
        (lambda _: {"route": "r"}, {"route": "r", "notes": ["more"]}),
        (None, {"notes": ["more"]}),
        (lambda _: {"notes": "text"}, {"notes": "text"}),  # refused where it is looked at
        (lambda _: "text", "text"),
    ],
)
def test_what_the_pair_itself_says_is_kept(describe, expected):
    assert arms._with_notes(describe, ["more"], print) == expected


@pytest.mark.parametrize(
    "error", [torch.cuda.OutOfMemoryError("full"), SystemExit(3), pytest.skip.Exception("no")]
)
@pytest.mark.parametrize("failing", ["a", "b", "c"])
def test_one_that_cannot_be_built_again_is_passed_over(chosen, said, error, failing):
    def make(name):
        if name == failing:
            raise error
        return built(name)

    given = [arm("a", 1.00, 2.0), arm("b", 1.01, 2.0), arm("c", 1.02, 2.0)]
    name, timed = chosen(given, lambda *_: 0.9, make)
    left = [each for each in "abc" if each != failing]
    assert name == left[0]
    assert timed == [(left[1], left[0])]
    assert said[0] == f"--fastlayer-admit took variant {name} for the candidate"
    assert said[1].startswith(f"variant {failing} could not be built again: ")
    assert type(error).__name__ in said[1]


def test_one_that_raises_beside_the_leader_is_told(chosen, said):
    def head_to_head(*_):
        raise RuntimeError("tired")

    chosen([arm("a", 1.0, 2.0), arm("b", 1.1, 3.0)], head_to_head)
    assert said[1:] == ["variant b beside a: RuntimeError: tired; a went on leading"]


def test_where_none_can_be_built_again_the_pair_keeps_its_own(chosen, said):
    def make(name):
        raise MemoryError(name)

    assert chosen([arm("b", 1.1, 2.0), arm("a", 1.0, 2.0)], None, make) == ("own", [])
    assert said == [
        "--fastlayer-admit took the pair's own candidate",
        "variant a could not be built again: MemoryError: a",
        "variant b could not be built again: MemoryError: b",
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), pytest.exit.Exception("enough")])
@pytest.mark.parametrize("when", ["built", "timed"])
def test_what_ends_the_run_ends_it(chosen, error, when):
    def stop(*_):
        raise error

    def make(name):
        return built(name) if name == "a" or when == "timed" else stop()

    with pytest.raises(type(error)):
        chosen([arm("a", 1.0, 2.0), arm("b", 1.1, 3.0)], stop, make)


@pytest.mark.parametrize("wins", [True, False])
def test_the_loser_is_gone_before_the_next_is_built(chosen, wins):
    alive = weakref.WeakValueDictionary()
    beside = []

    def make(name):
        beside.append(sorted(alive))
        variant = built(name)
        variant.itself = variant  # a cycle, as a module with hooks has
        alive[name] = variant
        return variant

    given = [arm(name, 1 + place / 100, 2.0) for place, name in enumerate("abcd")]
    last, _ = chosen(given, lambda *_: 1.1 if wins else 0.9, make)
    assert last == ("d" if wins else "a")
    assert beside == ([[], ["a"], ["b"], ["c"]] if wins else [[], ["a"], ["a"], ["a"]])

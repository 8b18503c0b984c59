"""Balanced orders of three arms, and what their statistics say of equal and unequal arms."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise

import pytest

from pytest_fastlayer import gate
from pytest_fastlayer import statistics as stats
from pytest_fastlayer.base import judging
from pytest_fastlayer.base.figures import ProcessSet, summarize
from pytest_fastlayer.base.rounds import Rounds, measure_rounds
from pytest_fastlayer.clocks import BlockTime, CpuClock
from pytest_fastlayer.measurement import Schedule
from pytest_fastlayer.nvml import ClockReading
from pytest_fastlayer.plan import Plan
from pytest_fastlayer.records import Verdict
from pytest_fastlayer.samples import PairedSamples
from pytest_fastlayer.telemetry import Telemetry

NAMES = ("reference", "base", "head")
PAIRS = [("reference", "base"), ("reference", "head"), ("base", "head")]
COST = {"reference": 4.0, "base": 2.0, "head": 1.0}


class Clock:
    """Blocks that cost what ``cost`` says at the moment they begin."""

    def __init__(self, cost):
        self.cost = cost
        self.blocks = []
        self.seeds = []

    def renew(self, seed):
        self.seeds.append(seed)

    def block(self, fn, forwards, *, cold=False):
        seconds = forwards * self.cost(fn, len(self.blocks))
        self.blocks.append(fn)
        return BlockTime(seconds, seconds)


def measured(cost, rounds=6, names=NAMES, forwards=1, **options):
    clock = Clock(cost)
    found = Rounds(dict.fromkeys(names, forwards), 1e-9)
    arms = {name: name for name in names}
    plan = Plan(pairs=2 * rounds, budget_s=None)
    measure_rounds(found, arms, clock, plan, first_seed=7, progress=lambda text: None, **options)
    return found, clock


def test_every_round_is_a_palindrome_and_all_orders_occur_alike():
    _, clock = measured(lambda name, i: 1.0)
    rounds = [clock.blocks[i : i + 6] for i in range(0, 36, 6)]
    assert all(one == one[::-1] for one in rounds)
    halves = Counter(tuple(half) for one in rounds for half in (one[:3], one[3:]))
    assert set(halves.values()) == {2}
    assert len(halves) == 6
    followers = Counter((a, b) for a, b in pairwise(clock.blocks) if a != b)
    assert max(followers.values()) - min(followers.values()) <= 1


def test_two_arms_alternate():
    _, clock = measured(lambda name, i: 1.0, rounds=2, names=("base", "head"))
    assert clock.blocks == ["base", "head", "head", "base", "head", "base", "base", "head"]
    _, clock = measured(lambda name, i: 1.0, rounds=4, names=("base", "head"))
    assert Counter(clock.blocks[::4]) == {"base": 2, "head": 2}


def test_contents_are_renewed_before_each_round():
    _, clock = measured(lambda name, i: 1.0, rounds=3)
    assert clock.seeds == [7, 8, 9]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_linear_drift_cancels_in_every_ratio(pair):
    found, _ = measured(lambda name, i: COST[name] * math.exp(0.05 * i), rounds=5)
    telemetry = Telemetry()
    for ratio in stats.usable_quads(found.pair(*pair, telemetry)).quad_ratios:
        assert ratio == pytest.approx(math.log(COST[pair[0]] / COST[pair[1]]))


def test_a_broken_round_leaves_whole_rounds():
    def cost(name, i):
        if i == 15:
            raise ConnectionError
        return 1.0

    found = Rounds(dict.fromkeys(NAMES, 1), 1e-9)
    arms = {name: name for name in NAMES}
    with pytest.raises(ConnectionError):
        measure_rounds(
            found, arms, Clock(cost), Plan(pairs=20), first_seed=0, progress=lambda text: None
        )
    assert len(found.orders) == 2
    assert {len(blocks) for blocks in found.blocks.values()} == {4}
    assert len(found.pair("base", "head", Telemetry()).order) == 4


def test_blocks_of_several_forwards_give_seconds_a_forward():
    found, _ = measured(lambda name, i: COST[name], forwards=3)
    samples = found.pair("reference", "head", Telemetry())
    assert samples.reference_s[0] == pytest.approx(4)
    assert samples.candidate_s[0] == pytest.approx(1)


def test_a_moved_clock_drops_its_pair_of_every_ratio_it_touches():
    class Monitor:
        reads = 0

        def read(self):
            Monitor.reads += 1
            return ClockReading(900 if Monitor.reads == 1 else 1800)

    found, _ = measured(lambda name, i: 1.0, monitor=Monitor())
    assert found.pair("reference", "head", Telemetry()).keep[0] is False
    assert found.pair("base", "head", Telemetry()).keep is None


SCHEDULE = Schedule(
    pairs=60, settle_s=0, block_ms=1, budget_s=60, l2="warm", min_effect=0.01, control=1 / 3
)


def process_set(generator, slower, noise=0.01, spread=0.0):
    """One set of noisy processes under a drift, the head ``slower`` times the base's time.

    ``spread`` is the standard deviation of what a process has for life.
    """
    drift = generator.gauss(0, 0.003)
    factors = {name: generator.lognormvariate(0, spread) for name in NAMES}

    def cost(name, i):
        life = factors[name] * (slower if name == "head" else 1.0)
        return life * math.exp(drift * i) * generator.lognormvariate(0, noise)

    rounds, _ = measured(cost, rounds=30)
    control = PairedSamples(
        reference_s=tuple(
            factors["reference"] * slower * generator.lognormvariate(0, noise) for _ in range(20)
        ),
        candidate_s=tuple(cost("head", 0) for _ in range(20)),
        order=("AB", "BA") * 10,
        forwards=(1, 1),
        resolution_s=1e-9,
    )
    return ProcessSet(rounds, control)


def verdict(generator, slower, **noise):
    """As a run reaches it: one more set while there may be something to decide."""
    policy, sets = gate.Policy(), []
    while True:
        sets.append(process_set(generator, slower, **noise))
        found = summarize(sets, SCHEDULE, CpuClock(), policy)
        if not judging.wants_more(found["verdict"], found["timing"], len(sets)):
            return found["verdict"]


@pytest.mark.parametrize(
    ("slower", "spread", "expected", "least", "most"),
    [
        (1.0, 0.0, Verdict.SLOWER, 0, 1),
        (1.0, 0.002, Verdict.SLOWER, 0, 1),
        (1.0, 0.04, Verdict.SLOWER, 0, 2),
        (1.05, 0.002, Verdict.SLOWER, 38, 40),
        (0.95, 0.002, Verdict.FASTER, 38, 40),
    ],
)
def test_alarms_and_detections(slower, spread, expected, least, most):
    """Forty runs of each: equal trees hardly ever alarm, however processes differ; 5% is found."""
    generator = random.Random(20261130)
    verdicts = [verdict(generator, slower, spread=spread) for _ in range(40)]
    assert least <= verdicts.count(expected) <= most

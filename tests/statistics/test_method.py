"""The method is measured: the committed table keeps its promises, and a part of it is made anew."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from statistics_makers import METHOD

from pytest_fastlayer import calibrate, gate, statistics
from pytest_fastlayer.calibrate import OURS, STREAMS, USUAL_RULES, Stream, samples_of
from pytest_fastlayer.gate import Policy

HERE = Path(__file__).parent
TABLE = HERE / "method_table.md"
RECORDING = HERE / "recorded_cpu.json"
ALL = (*STREAMS, *(calibrate.load_recorded(RECORDING, quads) for quads in (50, 4)))
GATES = 1000
PART = 25  #: gates made anew for each stream


@dataclass(frozen=True)
class Cell:
    alarms: int
    found: float  #: share of the gates


@dataclass(frozen=True)
class Line:
    floor: float
    rules: dict[str, Cell]


@cache
def committed() -> dict[tuple[str, int], Line]:
    """Rows of the committed table's first part by (stream, quads)."""
    first, _, _ = TABLE.read_text(encoding="utf-8").partition("A true speedup exactly on the bar")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in first.splitlines()
        if line.startswith("| ")
    ]
    header, _, *body = rows
    assert header == ["stream", "quads", "median floor", OURS, *USUAL_RULES]
    table = {}
    for name, quads, floor, *cells in body:
        rules = {}
        for rule, cell in zip(header[3:], cells, strict=True):
            match = re.fullmatch(r"(\d+) / ([\d.]+)%", cell)
            assert match, cell
            rules[rule] = Cell(int(match[1]), float(match[2]) / 100)
        table[name, int(quads)] = Line(float(floor.rstrip("%")) / 100, rules)
    return table


def key(stream: Stream) -> tuple[str, int]:
    return stream.name, stream.quads


def identifier(stream: Stream) -> str:
    return f"{stream.name}, {stream.quads} quads"


def test_table_is_of_this_method_and_of_every_stream() -> None:
    text = TABLE.read_text(encoding="utf-8")
    assert calibrate.method_line() in text
    assert f"Seed 0, {GATES} gates a row." in text
    assert list(committed()) == [key(stream) for stream in ALL]


@pytest.mark.parametrize("stream", ALL, ids=identifier)
def test_alarms_at_most_alpha_in_a_thousand_gates(stream: Stream) -> None:
    assert committed()[key(stream)].rules[OURS].alarms <= Policy().alpha * GATES


def test_finds_a_true_slowdown_of_3_percent_at_a_floor_of_1_percent() -> None:
    """Every synthetic disturbance of a full run at that floor, not only white noise."""
    at_floor = {
        name: line
        for (name, quads), line in committed().items()
        if quads == 50 and line.floor <= 0.0105 and not name.startswith("recorded")
    }
    assert len(at_floor) >= 6
    assert all(line.rules[OURS].found >= 0.95 for line in at_floor.values())


def test_what_pairing_buys() -> None:
    """Each usual rule breaks alpha, or sees nothing, on a stream where the gate does neither."""
    table = committed()
    drift = table["linear drift, 17.5% in each session", 50].rules
    steps = table["clock steps of 2.17x in mid-run", 50].rules
    recorded = table[f"recorded: {RECORDING.stem}", 50].rules
    for rule in USUAL_RULES:
        assert drift[rule].alarms == GATES
        assert steps[rule].alarms > Policy().alpha * GATES
        assert recorded[rule].alarms > GATES / 2
    assert table["white noise, 0.5% a block", 50].rules["unpaired medians, 5%"].found == 0


@pytest.mark.parametrize("stream", ALL, ids=identifier)
def test_a_part_made_anew_agrees_with_the_table(stream: Stream) -> None:
    """The first gates of the table's own seed: their counts are a part of the committed counts."""
    row = calibrate.calibrate(stream, PART)
    line = committed()[key(stream)]
    assert row.gates == PART
    for rule, cell in line.rules.items():
        assert row.alarms[rule] <= cell.alarms
        assert PART - row.alarms[rule] <= GATES - cell.alarms
        whole = round(cell.found * GATES)
        assert row.found[rule] <= whole
        assert PART - row.found[rule] <= GATES - whole
        for part, share in ((row.alarms[rule], cell.alarms / GATES), (row.found[rule], cell.found)):
            assert stats.binomtest(part, PART, share).pvalue > 1e-4


def test_the_same_seed_gives_the_same_part() -> None:
    noisy = STREAMS[1]
    first, second = (calibrate.calibrate(noisy, 10, seed=7) for _ in range(2))
    assert (first.alarms, first.found, first.floors) == (second.alarms, second.found, second.floors)
    assert first.floors != calibrate.calibrate(noisy, 10, seed=8).floors


def test_extending_until_it_suits_does_not_make_a_claim_true() -> None:
    """The table's second part: a true speedup on the bar passes in at most 5% of the gates."""
    head, _, counts = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in TABLE.read_text(encoding="utf-8").splitlines()[-3:]
    )
    assert head == ["quads", *map(str, calibrate.AT_THE_BAR)]
    assert counts[0] == "PASS"
    whole = {int(q): int(n) for q, n in zip(head[1:], counts[1:], strict=True)}
    assert all(0 < passed <= Policy().alpha * GATES for passed in whole.values())
    for quads in (3, 20):
        part = calibrate.claims_at_the_bar(quads, PART)
        assert part <= whole[quads]
        assert stats.binomtest(part, PART, whole[quads] / GATES).pvalue > 1e-4


def test_a_disturbance_in_step_with_the_quads_is_what_the_control_is_for() -> None:
    """Every fourth block 4% slow: no quad contradicts itself, yet all are biased alike.

    The A/A control runs on the same schedule, meets the same bias, and lifts the floor above it.
    """
    rng = np.random.default_rng(0)
    factors = np.exp(rng.normal(0, 0.002, 400)) * np.resize([1.0, 1.0, 1.0, 1.04], 400)
    samples, control = samples_of(factors, slice(0, 50)), samples_of(factors, slice(50, 100))
    fooled = statistics.summarize(samples, method=METHOD, min_effect=0.01)
    assert fooled.ci is not None
    assert fooled.ci[0] > 1.01
    guarded = statistics.summarize(samples, control=control, method=METHOD, min_effect=0.01)
    assert guarded.noise_floor > fooled.speedup - 1 - 0.002
    assert gate.needs_extension(guarded, Policy()) or guarded.ci[1] <= 1 + guarded.noise_floor


class TestStreams:
    @pytest.mark.parametrize("stream", ALL, ids=identifier)
    def test_factors_are_positive_and_as_long_as_asked(self, stream: Stream) -> None:
        planned = 4 * stream.quads
        factors = stream.factors(np.random.default_rng(0), (planned, 5 * planned))
        assert factors.shape == (2, 5 * planned)
        assert (factors > 0).all()

    def test_each_disturbs_as_its_name_says(self) -> None:
        rng, shape = np.random.default_rng(0), (200, 1000)
        drift = np.median(calibrate.drift(rng, shape)[:, [*range(3), *range(500, 503)]], axis=1)
        assert drift[1] / drift[0] == pytest.approx(1.175, rel=0.02)
        one = calibrate.drift(rng, shape)[0]
        assert one[195:205].mean() / one[:5].mean() == pytest.approx(1.175, rel=0.02)
        between = calibrate.between(rng, shape)
        assert between[1].mean() / between[0].mean() == pytest.approx(1.175, rel=0.01)
        steps = calibrate.steps(rng, shape)
        low, high = np.quantile(steps, [0.01, 0.99])
        assert high / low == pytest.approx(2.17, rel=0.03)
        jumps = np.abs(np.diff(np.log(steps), axis=1)) > math.log(1.5)
        assert (jumps.sum(axis=1) >= 0).all()
        assert (jumps.sum(axis=1) <= 3).all()
        assert jumps[:, 200:].sum() == 0
        tails = calibrate.tails(rng, (2000, 50_000))
        assert np.mean(tails > 2) == pytest.approx(0.01, abs=0.002)
        wander = np.log(calibrate.autocorrelated(rng, (2000, 50_000)))
        assert wander.std() == pytest.approx(0.03, rel=0.15)
        assert np.corrcoef(wander[0, 1:], wander[0, :-1])[0, 1] > 0.9

    def test_windows_of_a_recording_do_not_overlap(self) -> None:
        blocks = np.arange(1.0, 2001.0)
        for seed in range(50):
            pair = calibrate.recorded(np.random.default_rng(seed), (200, 1000), blocks)
            assert not set(pair[0]) & set(pair[1])
            assert (np.diff(pair, axis=1) == 1).all()

    def test_the_recording_is_real_and_disturbed(self) -> None:
        record = json.loads(RECORDING.read_text(encoding="utf-8"))
        blocks = np.array(record["blocks_s"])
        assert len(blocks) >= 4000
        assert blocks.max() > 2 * np.median(blocks)

    def test_a_useless_recording_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "short.json"
        path.write_text(json.dumps({"blocks_s": [1.0] * 399}), encoding="utf-8")
        with pytest.raises(ValueError, match=r"399 blocks.* at least 400 positive"):
            calibrate.load_recorded(path)
        path.write_text(json.dumps({"blocks_s": [1.0] * 399 + [0.0]}), encoding="utf-8")
        with pytest.raises(ValueError, match=r"smallest 0\.0 s"):
            calibrate.load_recorded(path)

    def test_the_candidate_is_the_inner_two_blocks(self) -> None:
        got = samples_of(np.arange(1.0, 13.0), slice(1, 3), slowdown=2.0)
        unit = calibrate.BLOCK_S
        assert got.reference_s == pytest.approx([unit * k for k in (5, 8, 9, 12)])
        assert got.candidate_s == pytest.approx([2 * unit * k for k in (6, 7, 10, 11)])
        assert got.order == ("AB", "BA", "AB", "BA")


class TestUsualRules:
    def test_unpaired_medians(self) -> None:
        then = np.array([1.0, 1.0, 9.0])
        assert calibrate.unpaired_medians(1.06 * then, then) == pytest.approx(0.06)
        assert calibrate.unpaired_medians(0.94 * then, then) == pytest.approx(-0.06)
        assert calibrate.unpaired_medians(1.04 * then, then) == 0

    def test_overlap_of_mean_and_deviation(self) -> None:
        then = np.array([0.9, 1.0, 1.1])
        assert calibrate.overlap(then + 0.21, then) == pytest.approx(0.21)
        assert calibrate.overlap(then - 0.21, then) == pytest.approx(-0.21)
        assert calibrate.overlap(then + 0.19, then) == 0

    def test_mann_whitney(self) -> None:
        then = np.linspace(0.9, 1.1, 30)
        assert calibrate.mann_whitney(then + 0.1, then) == pytest.approx(0.1)
        assert calibrate.mann_whitney(then + 0.001, then) == 0


def test_command_writes_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "STREAMS", STREAMS[-1:])
    monkeypatch.setattr(calibrate, "AT_THE_BAR", (3,))
    path = tmp_path / "table.md"
    assert calibrate.main(["--gates", "3", "--seed", "5", "--output", str(path)]) == 0
    assert capsys.readouterr().out == ""
    assert calibrate.main(["--gates", "3", "--seed", "5"]) == 0
    text = path.read_text(encoding="utf-8")
    assert capsys.readouterr().out == text
    assert f"| {STREAMS[-1].name} | 3 |" in text
    assert "Seed 5, 3 gates a row." in text
    assert text.endswith("| quads | 3 |\n| --- | ---: |\n| PASS | 0 |\n")


def test_command_fails_when_a_stream_breaks_alpha(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate that really differs, passed off as an A/A stream, must be alarmed."""

    def biased(rng: np.random.Generator, shape: calibrate.Shape) -> np.ndarray:
        return calibrate.white(rng, shape) * np.resize([1.0, 0.9, 0.9, 1.0], shape[1])

    monkeypatch.setattr(calibrate, "STREAMS", (Stream("biased", biased, quads=10),))
    monkeypatch.setattr(calibrate, "AT_THE_BAR", (3,))
    assert calibrate.main(["--gates", "3"]) == 1
    assert "more alarms than alpha allows: biased" in capsys.readouterr().err


def test_command_refuses_no_gates(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        calibrate.main(["--gates", "0"])
    assert caught.value.code == 2
    assert "--gates is 0: expected at least 1" in capsys.readouterr().err

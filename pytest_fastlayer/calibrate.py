"""Measure the method itself: how often the gate alarms on a callable gated against itself, and how
often it finds a true 3% slowdown, on streams of disturbed block times.

    python -m pytest_fastlayer.calibrate --recorded tests/statistics/recorded_cpu.json \\
        --output tests/statistics/method_table.md

A *stream* is what a machine does to two sessions of a benchmark: the factor by which each block,
in measured order, takes longer than it should. One session is stored as the baseline, the other
is the run. The gate sees the blocks as AB/BA pairs. The three usual rules see the candidate's
blocks of the two sessions, as tools do that keep seconds from another day.

Nothing here reads a clock: the same seed gives the same table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.random import Generator
from scipy import signal, stats

from pytest_fastlayer import gate, records, statistics
from pytest_fastlayer.gate import Policy
from pytest_fastlayer.records import Verdict
from pytest_fastlayer.samples import Array, PairedSamples

SLOWDOWN = 1.03  #: the true effect to be found
MIN_EFFECT = 0.01  #: the floor at which it is to be found
BLOCK_S = 0.05
RESOLUTION_S = 5e-7  #: step of CUDA events
JITTER = 0.005  #: white noise of one block, on top of every synthetic disturbance
LOOKS = gate.MAX_EXTENSIONS + 1

Shape = tuple[int, int]  #: (blocks of one session, blocks available with every extension)
Factors = Callable[[Generator, Shape], Array]  #: -> positive factors, (2 sessions, available)


@dataclass(frozen=True)
class Stream:
    """A named disturbance, and the number of quads in a session before any extension."""

    name: str
    factors: Factors
    quads: int = 50


def _progress(shape: Shape) -> Array:
    """Share of the planned session that has passed, held at 1 in extensions."""
    planned, available = shape
    share: Array = np.minimum(np.arange(available) / planned, 1.0)
    return share


def white(rng: Generator, shape: Shape, deviation: float = JITTER) -> Array:
    """Independent log-normal noise of each block."""
    noise: Array = np.exp(rng.normal(0, deviation, (2, shape[1])))
    return noise


def drift(rng: Generator, shape: Shape, total: float = 0.175) -> Array:
    """Each session slows down linearly by ``total``; the run starts where the baseline ended."""
    slope = 1 + total * _progress(shape)
    return white(rng, shape) * np.stack([slope, slope * (1 + total)])


def between(rng: Generator, shape: Shape, total: float = 0.175) -> Array:
    """Both sessions are steady, the run's day is slower by ``total``."""
    days: Array = np.array([[1.0], [1 + total]])
    return white(rng, shape) * days


def steps(rng: Generator, shape: Shape, factor: float = 2.17, most: int = 3) -> Array:
    """The clock switches by ``factor``, one to ``most`` times a session, at any block."""
    result = white(rng, shape)
    for session in result:
        slow = bool(rng.integers(2))
        edges = np.sort(rng.integers(0, shape[0], rng.integers(1, most + 1)))
        for start, end in zip([0, *edges], [*edges, shape[1]], strict=True):
            session[start:end] *= factor if slow else 1.0
            slow = not slow
    return result


def tails(rng: Generator, shape: Shape, share: float = 0.01, factor: float = 3.0) -> Array:
    """A share of the blocks takes ``factor`` times as long."""
    return white(rng, shape) * np.where(rng.random((2, shape[1])) < share, factor, 1.0)


def autocorrelated(rng: Generator, shape: Shape, rho: float = 0.98, sd: float = 0.03) -> Array:
    """AR(1) in log time with stationary deviation ``sd``: a machine that wanders."""
    innovations = rng.normal(0, sd * np.sqrt(1 - rho**2), (2, shape[1]))
    innovations[:, 0] = rng.normal(0, sd, 2)
    return white(rng, shape) * np.exp(signal.lfilter([1], [1, -rho], innovations, axis=1))


def combined(rng: Generator, shape: Shape) -> Array:
    """All of the above at once."""
    parts = (drift, between, steps, tails, autocorrelated)
    product: Array = np.prod([part(rng, shape) for part in parts], axis=0)
    return product


def recorded(rng: Generator, shape: Shape, blocks: Array) -> Array:
    """Two windows of a real recording, at random places that do not overlap."""
    available = min(shape[1], len(blocks) // 2)
    first = rng.integers(0, len(blocks) - 2 * available + 1)
    second = rng.integers(first + available, len(blocks) - available + 1)
    windows = [blocks[start : start + available] for start in (first, second)]
    return np.stack(windows if rng.random() < 0.5 else windows[::-1])


STREAMS: tuple[Stream, ...] = (
    Stream("white noise, 0.5% a block", white),
    Stream("white noise, 3% a block", partial(white, deviation=0.03)),
    Stream("linear drift, 17.5% in each session", drift),
    Stream("17.5% between the sessions", between),
    Stream("clock steps of 2.17x in mid-run", steps),
    Stream("heavy tails, 1% of blocks 3x slow", tails),
    Stream("autocorrelated, AR(1) 0.98, 3%", autocorrelated),
    Stream("all of these at once", combined),
    Stream("white noise, 0.5% a block", white, quads=4),
    Stream("clock steps of 2.17x in mid-run", steps, quads=4),
    Stream("heavy tails, 1% of blocks 3x slow", tails, quads=3),
)


def load_recorded(path: Path, quads: int = 50) -> Stream:
    """A stream from a JSON file ``{"blocks_s": [...]}`` of consecutive blocks of one callable.

    Raises ValueError when there are fewer blocks than two sessions need, or one is not positive.
    """
    blocks = np.array(json.loads(path.read_text(encoding="utf-8"))["blocks_s"], dtype=np.float64)
    if len(blocks) < 2 * 4 * quads or not (blocks > 0).all():
        raise ValueError(
            f"{path} holds {len(blocks)} blocks, the smallest {blocks.min(initial=0)} s: expected "
            f"at least {2 * 4 * quads} positive times; record more blocks"
        )
    return Stream(f"recorded: {path.stem}", partial(recorded, blocks=blocks / BLOCK_S), quads)


def samples_of(factors: Array, quads: slice, slowdown: float = 1.0) -> PairedSamples:
    """Quads of one session as the timer would have seen them; the candidate is ``slowdown`` slow.

    ``factors`` is 1-D, in measured order A B B A.
    """
    blocks = BLOCK_S * factors[4 * quads.start : 4 * quads.stop].reshape(-1, 4)
    reference, candidate = blocks[:, [0, 3]], blocks[:, [1, 2]] * slowdown
    return PairedSamples(
        tuple(reference.ravel().tolist()),
        tuple(candidate.ravel().tolist()),
        ("AB", "BA") * len(blocks),
        forwards=(1, 1),
        resolution_s=RESOLUTION_S,
    )


def _measure(
    factors: Array, quads: int, policy: Policy, slowdown: float = 1.0
) -> tuple[PairedSamples, records.Timing]:
    """A session, extended as the gate asks for it while the stream lasts."""
    method = records.Method(clock="cuda_events", settle_s=10, block_ms=1e3 * BLOCK_S)
    looks = min(LOOKS, len(factors) // (4 * quads))
    samples = samples_of(factors, slice(0, quads), slowdown)
    timing = statistics.summarize(samples, method=method, min_effect=MIN_EFFECT)
    for look in range(1, looks):
        if not gate.needs_extension(timing, policy):
            break
        more = samples_of(factors, slice(look * quads, (look + 1) * quads), slowdown)
        samples = samples.extended(more)
        timing = statistics.summarize(
            samples, method=method, min_effect=MIN_EFFECT, extensions=look
        )
    return samples, timing


_DEVICE = records.Device(type="cuda", name="synthetic", multiprocessors=1, memory_mib=1)
ACCURATE = records.CaseRecord(
    verdict=Verdict.ACCURATE,
    accuracy=records.Accuracy(
        trials=1,
        seeds=(0,),
        failed=0,
        nonfinite=0,
        total=1,
        max_abs=0,
        budget_used=0,
        tolerance=records.ToleranceRecord(atol=0, rtol=0),
    ),
)


def _verdict(timing: records.Timing, stored: records.Timing, policy: Policy) -> Verdict:
    baseline = records.RunRecord(
        created="",
        device=_DEVICE,
        software=records.Software(python="", platform=""),
        cases={"case": ACCURATE.model_copy(update={"timing": stored})},
    )
    case = ACCURATE.model_copy(update={"timing": timing})
    return gate.judge(case, baseline, name="case", device=_DEVICE, policy=policy).verdict


def unpaired_medians(now: Array, then: Array) -> float:
    """Change of the median seconds if beyond 5%, else 0."""
    change = float(np.median(now) / np.median(then) - 1)
    return change if abs(change) > 0.05 else 0.0


def overlap(now: Array, then: Array) -> float:
    """Difference of the means if the intervals mean ± standard deviation are disjoint, else 0."""
    difference = float(now.mean() - then.mean())
    return difference if abs(difference) > now.std(ddof=1) + then.std(ddof=1) else 0.0


def mann_whitney(now: Array, then: Array) -> float:
    """Difference of the medians if the two-sided Mann-Whitney test rejects at 5%, else 0."""
    rejected = stats.mannwhitneyu(now, then).pvalue < 0.05
    return float(np.median(now) - np.median(then)) if rejected else 0.0


USUAL_RULES: dict[str, Callable[[Array, Array], float]] = {
    "unpaired medians, 5%": unpaired_medians,
    "mean ± stddev overlap": overlap,
    "Mann-Whitney, 5%": mann_whitney,
}


@dataclass
class Row:
    """Counts over the gates of one stream; ``floors`` are the run's noise floors, fractions."""

    stream: Stream
    gates: int = 0
    alarms: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    floors: list[float] = field(default_factory=list)


OURS = "this gate"


def calibrate(stream: Stream, gates: int, seed: int = 0) -> Row:
    """Gate a callable against itself, and against itself slowed by 3%, ``gates`` times each.

    An alarm of ours is SLOWER or FASTER against the stored session, or a claimed speedup (PASS)
    where both arms are the same callable. Each gate has its own seed, so that a smaller number
    of gates is a part of a larger one.
    """
    row = Row(stream)
    claim = Policy()
    # The same timing with a claim that always holds: FASTER may not hide behind BELOW_FLOOR.
    against_itself = Policy(min_speedup=0.01)
    for number in range(gates):
        rng = np.random.default_rng([seed, number])
        planned = 4 * stream.quads
        then, now = stream.factors(rng, (planned, LOOKS * planned))
        stored_samples, stored = _measure(then, stream.quads, claim)
        samples, timing = _measure(now, stream.quads, claim)
        slow_samples, slow = _measure(now, stream.quads, claim, SLOWDOWN)
        row.gates += 1
        row.floors.append(timing.noise_floor)
        alarms = {_verdict(timing, stored, policy) for policy in (claim, against_itself)}
        claimed = _verdict(timing, stored, claim) in (Verdict.PASS, Verdict.FASTER)
        row.alarms[OURS] += claimed or bool(alarms & {Verdict.SLOWER, Verdict.FASTER})
        row.found[OURS] += _verdict(slow, stored, claim) is Verdict.SLOWER
        for name, rule in USUAL_RULES.items():
            seconds = np.array(stored_samples.candidate_s)
            row.alarms[name] += rule(np.array(samples.candidate_s), seconds) != 0
            row.found[name] += rule(np.array(slow_samples.candidate_s), seconds) > 0
    return row


def claims_at_the_bar(quads: int, gates: int, seed: int = 0) -> int:
    """PASS verdicts of a candidate whose true speedup lies exactly on the bar.

    The hardest case for a method that extends what straddles its bar: white noise, no margin
    between truth and bar, and up to five looks.
    """
    policy = Policy(min_speedup=1 / (1 + MIN_EFFECT))
    planned = 4 * quads
    passed = 0
    for number in range(gates):
        # Noise well below the minimum effect, so that the bar is known and not itself noise.
        noise = white(np.random.default_rng([seed, number]), (planned, LOOKS * planned), 0.003)
        _, timing = _measure(noise[0], quads, policy)
        passed += timing.ci is not None and timing.ci[0] > 1
    return passed


#: Quads of the gates whose true speedup lies on the bar.
AT_THE_BAR = (3, 4, 12, 20, 50)


def method_line() -> str:
    """The constants that the table depends on: a table with another line is out of date."""
    return (
        f"Method: {statistics.RESAMPLES} resamples, Student below {statistics.FEW_QUADS} quads, "
        f"disagreement quantile {statistics.DISAGREEMENT_QUANTILE}, confidence "
        f"{statistics.CONFIDENCE}, alpha {Policy().alpha}, minimum effect {MIN_EFFECT}, up to "
        f"{gate.MAX_EXTENSIONS} extensions."
    )


def table(rows: Sequence[Row], at_the_bar: dict[int, int], gates: int, seed: int) -> str:
    """The rows and the counts of `claims_at_the_bar` as Markdown, with what they mean."""
    names = [OURS, *USUAL_RULES]
    lines = [
        "# What the method does on disturbed machines",
        "",
        f"Each cell: false alarms in {gates} gates of a callable against itself / share of "
        f"{gates} gates that found a true {SLOWDOWN - 1:.0%} slowdown. Produced by "
        "`python -m pytest_fastlayer.calibrate`, whose docstring says what each rule sees.",
        "",
        method_line(),
        f"Seed {seed}, {gates} gates a row. At most {Policy().alpha * gates:.0f} alarms are "
        "allowed. The gate's floor adapts to the machine: where it is far above "
        f"{MIN_EFFECT:.0%}, a 3% slowdown is out of its reach and it says so (minimum detectable "
        "effect) instead of guessing.",
        "",
        "| stream | quads | median floor | " + " | ".join(names) + " |",
        "| --- | ---: | ---: |" + " ---: |" * len(names),
    ]
    for row in rows:
        cells = [f"{row.alarms[name]} / {row.found[name] / row.gates:.1%}" for name in names]
        floor = f"{np.median(row.floors):.1%}"
        head = [row.stream.name, str(row.stream.quads), floor]
        lines.append("| " + " | ".join([*head, *cells]) + " |")
    lines += [
        "",
        f"A true speedup exactly on the bar, extended as often as the gate asks: PASS in {gates} "
        f"gates, at most {Policy().alpha * gates:.0f} allowed.",
        "",
        "| quads | " + " | ".join(map(str, at_the_bar)) + " |",
        "| --- |" + " ---: |" * len(at_the_bar),
        "| PASS | " + " | ".join(map(str, at_the_bar.values())) + " |",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Iterable[str] | None = None) -> int:
    """Command line; 0 when every stream kept to alpha, 1 when one did not."""
    parser = argparse.ArgumentParser(
        prog="python -m pytest_fastlayer.calibrate",
        description="Measure the gate's false alarms and detections on disturbed streams.",
    )
    parser.add_argument("--gates", type=int, default=1000, help="gates per stream (1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--recorded",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE",
        help='recorded streams, JSON {"blocks_s": [...]}',
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.gates < 1:
        parser.error(f"--gates is {options.gates}: expected at least 1")
    if options.output:
        try:
            options.output.open("a").close()
        except OSError as error:
            parser.error(f"--output {options.output} cannot be written: {error.strerror}")
    rows = []
    recordings = [load_recorded(path, quads) for path in options.recorded for quads in (50, 4)]
    for stream in (*STREAMS, *recordings):
        print(f"{stream.name}, {stream.quads} quads ...", file=sys.stderr, flush=True)
        rows.append(calibrate(stream, options.gates, options.seed))
    print("true speedups on the bar ...", file=sys.stderr, flush=True)
    at_the_bar = {q: claims_at_the_bar(q, options.gates, options.seed) for q in AT_THE_BAR}
    text = table(rows, at_the_bar, options.gates, options.seed)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    allowed = Policy().alpha * options.gates
    bad = [row.stream.name for row in rows if row.alarms[OURS] > allowed]
    bad += [f"{quads} quads on the bar" for quads, n in at_the_bar.items() if n > allowed]
    for name in bad:
        print(f"more alarms than alpha allows: {name}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())

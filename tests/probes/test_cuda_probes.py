"""Streams, graphs, events and allocator memory: the cheats and the honest forms of CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from pytest_fastlayer.accuracy import compare
from pytest_fastlayer.clocks import CudaClock
from pytest_fastlayer.memory import peak_memory
from pytest_fastlayer.timing import Plan, Telemetry, measure

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROWS, WIDTH = 2048, 1024


def inputs(seed: int) -> tuple[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(ROWS, WIDTH, device="cuda", generator=generator),)


def honest(x: torch.Tensor) -> torch.Tensor:
    for _ in range(8):
        x = functional.gelu(x) + 0.5
    return x


class SideStream:
    """``honest`` on a stream of its own, with or without waiting in either direction."""

    def __init__(self, *, waits: bool, joins: bool) -> None:
        self.waits, self.joins = waits, joins
        self.stream = torch.cuda.Stream()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        output = torch.empty_like(x)
        if self.waits:
            self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            output.copy_(honest(x))
        if self.joins:
            current.wait_stream(self.stream)
            output.record_stream(self.stream)
        return output


class Graph:
    """CUDA-graph capture and replay; ``copies`` says whether the output is copied out."""

    def __init__(self, *, copies: bool) -> None:
        self.copies = copies
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.graph is None:
            self.static = x.clone()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                honest(self.static)
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.output = honest(self.static)
        self.static.copy_(x)
        self.graph.replay()
        return self.output.clone() if self.copies else self.output


def ask(probe: Any, candidate: Any) -> dict[str, str]:
    found: dict[str, str] = probe(candidate, honest, inputs, device="cuda")
    return found


def test_work_that_does_not_wait_for_the_inputs_is_caught(probe: Any) -> None:
    caught = ask(probe, SideStream(waits=False, joins=True))
    assert "another stream" in caught["side_stream"]


def test_work_that_nobody_waits_for_is_caught(probe: Any) -> None:
    caught = ask(probe, SideStream(waits=True, joins=False))
    assert "another stream" in caught["side_stream"]


def test_a_graphs_own_output_buffer_is_caught(probe: Any) -> None:
    assert "the same memory" in ask(probe, Graph(copies=False))["two_outputs_held"]


def test_memory_never_written_is_caught(probe: Any) -> None:
    def candidate(x: torch.Tensor) -> torch.Tensor:
        result = honest(x)
        del result
        return torch.empty_like(x)

    assert "memory that it never wrote" in ask(probe, candidate)["unwritten_output"]


def test_poison_reaches_what_the_allocator_hands_out_again(probe: Any) -> None:
    """An allocation that torch's dispatcher on this thread never sees, as in an extension."""
    from pytest_fastlayer.probes.memory import poison_free_memory

    like = torch.ones(ROWS, WIDTH, device="cuda")
    poison_free_memory(like)
    again = torch.empty_like(like)
    assert bool(again.isnan().all())


@pytest.mark.parametrize(
    "candidate",
    [
        honest,
        lambda x: SideStream(waits=True, joins=True)(x),
        Graph(copies=True),
        lambda x: honest(x.t().contiguous()).t(),
    ],
    ids=["plain", "streams joined", "graph with copy-out", "non-contiguous"],
)
def test_honest_candidates_pass(probe: Any, candidate: Any) -> None:
    assert ask(probe, candidate) == {}


def test_compiled_candidate_passes(probe: Any) -> None:
    assert ask(probe, torch.compile(honest)) == {}


def test_reduce_overhead_is_judged_by_what_it_does(probe: Any) -> None:
    """Its outputs live in a graph's pool: whether one survives later calls is torch's to say.

    On an H200 under torch 2.11 the held outputs survived every probe.
    """
    caught = ask(probe, torch.compile(honest, mode="reduce-overhead"))
    assert set(caught) <= {"two_outputs_held"}


@pytest.mark.parametrize("joins", [False, True])
def test_hidden_work_shows_as_time_after_the_timed_stream(joins: bool) -> None:
    x = torch.randn(16 * ROWS, WIDTH, device="cuda")  # device work well beyond its launches
    candidate, telemetry = SideStream(waits=True, joins=joins), Telemetry()
    measure(
        lambda: honest(x),
        lambda: candidate(x),
        clock=CudaClock(torch.device("cuda")),
        plan=Plan(pairs=6, settle_s=0.1, block_ms=10),
        telemetry=telemetry,
    )
    assert telemetry.probe().passed is joins


@pytest.mark.parametrize("cold", [False, True])
def test_events_measure_a_known_delay(cold: bool) -> None:
    clock = CudaClock(torch.device("cuda"))

    def sleep(cycles: int) -> float:
        return clock.block(lambda: torch.cuda._sleep(cycles), 4, cold=cold).seconds / 4

    sleep(1_000_000)
    short, long = sleep(5_000_000), sleep(10_000_000)
    assert long / short == pytest.approx(2.0, rel=0.15)
    block = clock.block(lambda: torch.cuda._sleep(5_000_000), 4, cold=cold)
    assert block.seconds <= block.wall_s
    assert block.tail_s < 0.002


def test_a_flush_makes_what_fits_the_cache_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1 << 22, device="cuda")  # 16 MiB
    clock = CudaClock(torch.device("cuda"))

    def least() -> float:
        return min(clock.block(lambda: x.add_(1), 50, cold=True).seconds / 50 for _ in range(8))

    cold = least()
    # As long a delay before each forward, but one that leaves the cache as it is.
    monkeypatch.setattr(clock, "_flush_cache", lambda: torch.cuda._sleep(200_000))
    assert cold > 1.1 * least()


def test_peak_memory_counts_what_a_call_allocates() -> None:
    peak = peak_memory(lambda: torch.ones(1 << 24, device="cuda") + 1, "cuda")
    assert peak == pytest.approx(128, abs=4)


@pytest.mark.parametrize("contiguous", [True, False])
def test_comparison_is_bounded_in_memory_and_quick(contiguous: bool) -> None:
    reference = torch.randn(40_000, 4096, device="cuda")  # case 6's 163.8 million elements
    if not contiguous:
        reference = reference.t()
    candidate = reference * 1.0001
    peak = peak_memory(lambda: compare(candidate, reference), "cuda")
    assert peak is not None
    assert peak < 256
    clock = CudaClock(torch.device("cuda"))
    seconds = clock.block(lambda: compare(candidate, reference), 1).wall_s
    assert seconds < 2.0

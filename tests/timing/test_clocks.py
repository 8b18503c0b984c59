"""The CPU clock on real work, the caches, and the timers captured at import."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch

from pytest_fastlayer.clocks import (
    FLUSH_MULTIPLE,
    CpuClock,
    clock_for,
    cpu_cache_bytes,
    patched_timers,
)
from pytest_fastlayer.timing import Plan, measure


def test_cpu_clock_times_the_forwards_it_runs() -> None:
    calls: list[bool] = []
    clock = clock_for("cpu")
    block = clock.block(lambda: calls.append(gc.isenabled()), 7)
    assert calls == [False] * 7  # no collection inside a block
    assert gc.isenabled()
    assert 0 < block.seconds <= block.wall_s
    assert block.tail_s == 0.0
    assert clock.name == "cpu_clock"
    assert 0 < clock.resolution_s < 1e-3


def test_collection_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        clock_for("cpu").block(lambda: None, 1)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_cold_blocks_flush_before_each_forward_outside_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    clock = CpuClock()
    now = [0.0]

    def advance(what: str, seconds: float) -> None:
        events.append(what)
        now[0] += seconds

    monkeypatch.setattr(clock, "_flush_cache", lambda: advance("flush", 100.0))
    monkeypatch.setattr("pytest_fastlayer.clocks._perf_counter", lambda: now[0])
    block = clock.block(lambda: advance("forward", 1.0), 3, cold=True)
    assert events == ["flush", "forward"] * 3
    assert block.seconds == 3.0
    assert block.wall_s == 303.0


def test_a_flush_is_a_multiple_of_the_machines_own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_fastlayer.clocks.cpu_cache_bytes", lambda: 4096)
    clock = CpuClock()
    clock.block(lambda: None, 1, cold=True)
    assert clock._flush is not None
    assert clock._flush.numel() == FLUSH_MULTIPLE * 4096


def test_cache_size_is_the_largest_the_system_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sysconf_names", {})
    for index, size in enumerate(("32K", "1024K", "8M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert cpu_cache_bytes(tmp_path) == 8 << 20
    assert cpu_cache_bytes(tmp_path / "none") == 32 << 20


def test_other_devices_have_no_clock() -> None:
    with pytest.raises(ValueError, match="meta"):
        clock_for("meta")


def test_untouched_timers_are_the_captured_ones() -> None:
    assert patched_timers() == []


@pytest.mark.parametrize(
    ("owner", "attribute", "name"),
    [
        (time, "perf_counter", "time.perf_counter"),
        (time, "perf_counter_ns", "time.perf_counter_ns"),
        (torch.cuda, "Event", "torch.cuda.Event"),
        (torch.cuda, "synchronize", "torch.cuda.synchronize"),
        (torch.cuda.Event, "elapsed_time", "torch.cuda.Event.elapsed_time"),
        (torch.cuda.Event, "record", "torch.cuda.Event.record"),
        (gc, "disable", "gc.disable"),
    ],
)
def test_a_replaced_timer_is_named(
    monkeypatch: pytest.MonkeyPatch, owner: object, attribute: str, name: str
) -> None:
    monkeypatch.setattr(owner, attribute, lambda *_, **__: 0)
    assert patched_timers() == [name]


def test_a_real_pair_is_ranked_rightly() -> None:
    """Ten times the work, whatever the machine is doing meanwhile."""
    a = torch.randn(96, 96)

    def work(count: int) -> None:
        for _ in range(count):
            torch.sin(a)

    samples = measure(
        lambda: work(30),
        lambda: work(3),
        clock=clock_for("cpu"),
        plan=Plan(pairs=6, settle_s=0.02, block_ms=2, budget_s=2),
    )
    ratios = [r / c for r, c in zip(samples.reference_s, samples.candidate_s, strict=True)]
    assert sorted(ratios)[3] > 2.0

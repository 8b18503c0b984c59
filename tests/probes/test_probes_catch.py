"""One minimal cheating candidate for each probe: it must be caught, and the message name it.

Every cheat here passes a plain accuracy check on its first call, which is why probes exist;
``test_each_cheat_looks_right_on_its_own`` holds them to that.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from probe_pair import honest, make_inputs
from torch.nn import functional

from pytest_fastlayer.accuracy import compare
from pytest_fastlayer.probes import after_timing

Candidate = Callable[[torch.Tensor], Any]


def replays_by_pointer() -> Candidate:
    cache: dict[int, torch.Tensor] = {}

    def candidate(x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() not in cache:
            cache[x.data_ptr()] = honest(x)
        return cache[x.data_ptr()].clone()

    return candidate


def replays_by_identity_and_version() -> Candidate:
    cache: dict[tuple[int, int], torch.Tensor] = {}

    def candidate(x: torch.Tensor) -> torch.Tensor:
        key = (id(x), x._version)
        if key not in cache:
            cache[key] = honest(x)
        return cache[key].clone()

    return candidate


def replays_by_shape() -> Candidate:
    cache: dict[torch.Size, torch.Tensor] = {}

    def candidate(x: torch.Tensor) -> torch.Tensor:
        return cache.setdefault(x.shape, honest(x)).clone()

    return candidate


def replays_by_one_element() -> Candidate:
    cache: dict[float, torch.Tensor] = {}

    def candidate(x: torch.Tensor) -> torch.Tensor:
        key = float(x[-1, 0])
        if key not in cache:
            cache[key] = honest(x)
        return cache[key].clone()

    return candidate


def returns_one_cached_buffer() -> Candidate:
    buffer: list[torch.Tensor] = []

    def candidate(x: torch.Tensor) -> torch.Tensor:
        if not buffer:
            buffer.append(torch.empty_like(x))
        return buffer[0].copy_(honest(x))

    return candidate


def returns_a_view_of_a_cached_buffer() -> Candidate:
    buffer = torch.zeros(64, 32)

    def candidate(x: torch.Tensor) -> torch.Tensor:
        buffer[: len(x)].copy_(honest(x))
        return buffer[: len(x)]

    return candidate


def overwrites_its_input() -> Candidate:
    def candidate(x: torch.Tensor) -> torch.Tensor:
        result = honest(x)
        x.zero_()
        return result

    return candidate


def returns_its_input() -> Candidate:
    return lambda x: x.copy_(honest(x))


def never_writes() -> Candidate:
    """Right as long as the heap hands it the memory that holds the reference's result."""

    def candidate(x: torch.Tensor) -> torch.Tensor:
        result = honest(x)
        del result  # as the reference's own output would be
        return torch.empty_like(x)

    return candidate


def writes_all_but_a_tail() -> Candidate:
    def candidate(x: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(x)
        output.view(-1)[:-1] = honest(x).view(-1)[:-1]
        return output

    return candidate


def searches_memory() -> Candidate:
    """Finds a young tensor that looks like the result among all objects, none of its own."""
    mine: list[int] = []

    def candidate(x: torch.Tensor) -> torch.Tensor:
        found = [
            one
            for one in gc.get_objects(generation=0)
            if type(one) is torch.Tensor and one.shape == x.shape and id(one) not in (*mine, id(x))
        ]
        output = found[-1].clone() if mine and found else honest(x)
        mine.append(id(output))
        return output

    return candidate


class LazyTensor(torch.Tensor):
    """Computes when it is looked at: here it only wears the costume."""


def returns_a_lazy_tensor() -> Candidate:
    return lambda x: honest(x).as_subclass(LazyTensor)


class LazyList(list[torch.Tensor]):
    """A container that could compute in __getitem__."""


def returns_a_lazy_container() -> Candidate:
    return lambda x: LazyList([honest(x)])


def finishes_on_another_thread() -> Candidate:
    """Each output is filled while the next one is asked for, so that nothing here is a race."""
    pending: list[tuple[threading.Event, threading.Thread]] = []

    def candidate(x: torch.Tensor) -> torch.Tensor:
        output, kept, release = torch.zeros_like(x), x.clone(), threading.Event()

        def work() -> None:
            release.wait(10)
            output.copy_(honest(kept))

        for event, thread in pending:
            event.set()
            thread.join()
        pending[:] = [(release, threading.Thread(target=work, daemon=True))]
        pending[0][1].start()
        return output

    return candidate


def slows_the_reference_down() -> Candidate:
    def candidate(x: torch.Tensor) -> torch.Tensor:
        torch.set_float32_matmul_precision("high")
        return honest(x)

    return candidate


def patches_a_function() -> Candidate:
    original = functional.gelu

    def candidate(x: torch.Tensor) -> torch.Tensor:
        functional.gelu = lambda y: original(y)
        return original(x) * 2 + 1

    return candidate


def patches_the_timer() -> Candidate:
    def candidate(x: torch.Tensor) -> torch.Tensor:
        time.perf_counter = lambda: 0.0  # type: ignore[assignment]
        return honest(x)

    return candidate


def patches_cuda_events() -> Candidate:
    def candidate(x: torch.Tensor) -> torch.Tensor:
        torch.cuda.Event.elapsed_time = lambda *_: 1e-3  # type: ignore[method-assign]
        return honest(x)

    return candidate


CHEATS: list[tuple[Callable[[], Candidate], str, str]] = [
    (replays_by_pointer, "fresh_contents", "replayed by pointer"),
    (replays_by_identity_and_version, "fresh_contents", "replayed by pointer, version"),
    (replays_by_shape, "fresh_contents", "returned its earlier result"),
    (replays_by_one_element, "few_elements", "replayed by those few"),
    (returns_one_cached_buffer, "two_outputs_held", "the same memory"),
    (returns_a_view_of_a_cached_buffer, "two_outputs_held", "the same memory"),
    (overwrites_its_input, "input_unchanged", "overwrote input[0]"),
    (returns_its_input, "output_aliases_input", "shares memory with an input"),
    (never_writes, "unwritten_output", "memory that it never wrote"),
    (writes_all_but_a_tail, "unwritten_output", "1 of 512 elements"),
    (searches_memory, "reference_memory", "found in the test's memory"),
    (returns_a_lazy_tensor, "output_type", "LazyTensor"),
    (returns_a_lazy_container, "output_type", "LazyList"),
    (finishes_on_another_thread, "two_outputs_held", "on another thread"),
    (slows_the_reference_down, "global_state", "float32 matmul precision"),
    (patches_a_function, "patched_functions", "torch.nn.functional.gelu"),
    (patches_the_timer, "timers", "time.perf_counter replaced"),
    (patches_cuda_events, "timers", "torch.cuda.Event.elapsed_time replaced"),
]


@pytest.fixture(autouse=True)
def _restored() -> Any:
    """Undo what the cheats do to the process."""
    kept = functional.gelu, time.perf_counter, torch.cuda.Event.elapsed_time
    precision = torch.get_float32_matmul_precision()
    yield
    functional.gelu, time.perf_counter, torch.cuda.Event.elapsed_time = kept  # type: ignore[method-assign]
    torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize(
    ("cheat", "name", "words"), CHEATS, ids=[cheat.__name__ for cheat, _, _ in CHEATS]
)
def test_cheat_is_caught_by_name(probe: Any, cheat: Any, name: str, words: str) -> None:
    reference = (lambda x: [honest(x)]) if cheat is returns_a_lazy_container else honest
    caught = probe(cheat(), reference)
    assert name in caught
    assert words in caught[name]


@pytest.mark.parametrize("cheat", [replays_by_pointer, returns_one_cached_buffer, searches_memory])
def test_cheats_are_caught_with_outputs_handed_in(probe: Any, cheat: Any) -> None:
    expected = {seed: honest(*make_inputs(seed)) for seed in (1234, 1235)}
    kept = {seed: output.clone() for seed, output in expected.items()}
    caught = probe(cheat(), expected=expected)
    assert {"fresh_contents", "two_outputs_held", "reference_memory"} & set(caught)
    for seed, output in expected.items():
        assert torch.equal(output, kept[seed])  # veiled, and put back to the bit


def test_reading_the_reference_from_a_frame_is_caught(probe: Any) -> None:
    """A candidate that walks up the stack to the outputs that the probes were handed."""
    expected = {seed: honest(*make_inputs(seed)) for seed in (1234, 1235)}

    def candidate(x: torch.Tensor) -> torch.Tensor:
        frame = sys._getframe()
        while frame is not None:
            run = frame.f_locals.get("self")
            if hasattr(run, "expected"):
                matches = [o for s, o in run.expected.items() if torch.equal(make_inputs(s)[0], x)]
                return matches[0].clone()
            frame = frame.f_back
        return honest(x)

    caught = probe(candidate, expected=expected)
    assert "found in the test's memory" in caught["reference_memory"]


def test_mutating_the_references_weights_is_caught(probe: Any) -> None:
    reference = torch.nn.Linear(32, 32).eval()

    def candidate(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            reference.weight.zero_()
            reference.bias.zero_()
        return torch.zeros_like(x)

    caught = probe(candidate, reference)
    assert "the value of weight changed" in caught["reference_unchanged"]


def test_replacing_the_references_forward_is_caught(probe: Any) -> None:
    reference = torch.nn.Linear(32, 32).eval()

    def candidate(x: torch.Tensor) -> torch.Tensor:
        reference.forward = lambda y: y * 0  # type: ignore[method-assign]
        return x * 0

    assert "forward code" in probe(candidate, reference)["reference_unchanged"]


def test_a_cached_mask_must_not_outlive_new_data(probe: Any) -> None:
    """Caching by the mask's version is fair; caching the data's result by it is not."""

    def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(8, 4, generator=generator)
        return x, torch.rand(8, 4, generator=generator) > 0.3

    def reference(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x * mask

    def fair(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        key = (id(mask), mask._version)
        if key not in kept:
            kept[key] = mask.clone()
        return x * kept[key]

    def unfair(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        key = (id(mask), mask._version)
        if key not in kept:
            kept[key] = x * mask
        return kept[key].clone()

    kept: dict[tuple[int, int], torch.Tensor] = {}
    assert probe(fair, reference, inputs) == {}
    kept.clear()
    assert "fresh_contents" in probe(unfair, reference, inputs)


@pytest.mark.parametrize("shared", [True, False], ids=["shared weights", "own copies"])
def test_stale_weights_are_caught(probe: Any, shared: bool) -> None:
    reference = torch.nn.Linear(32, 32).eval()

    class Packed(torch.nn.Module):
        """Keeps a transposed copy of the weights from the time it was made."""

        def __init__(self) -> None:
            super().__init__()
            like = (lambda p: p) if shared else (lambda p: torch.nn.Parameter(p.detach().clone()))
            self.weight, self.bias = like(reference.weight), like(reference.bias)
            self.packed = self.weight.detach().t().contiguous()
            self.packed_bias = self.bias.detach().clone()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.packed + self.packed_bias

    before = {name: value.clone() for name, value in reference.state_dict().items()}
    caught = probe(Packed(), reference)
    assert list(caught) == ["stale_weights"]
    assert "still computes with the old ones" in caught["stale_weights"]
    for name, value in reference.state_dict().items():
        assert torch.equal(value, before[name])

    class Follows(Packed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, self.weight, self.bias)

    assert probe(Follows(), reference) == {}
    packed = Packed()
    assert "stale_weights" in probe(lambda x: packed(x), reference, weights_of=(reference, packed))


def test_replaying_once_calls_have_been_counted_is_caught_after_the_timing(probe: Any) -> None:
    calls: list[torch.Tensor] = []

    def candidate(x: torch.Tensor) -> torch.Tensor:
        if len(calls) < 50:
            calls.append(honest(x))
            return calls[-1].clone()
        return calls[-1].clone()

    assert probe(candidate) == {}
    assert after_timing(honest, candidate, make_inputs, 1235).passed
    for _ in range(100):
        candidate(*make_inputs(1234))
    found = after_timing(honest, candidate, make_inputs, 1235)
    assert not found.passed
    assert "replayed once calls have been counted" in found.message
    known = after_timing(honest, honest, make_inputs, 7, expected=honest(*make_inputs(7)))
    assert known.passed


@pytest.mark.parametrize(
    ("cheat", "name"),
    [
        (c, n)
        for c, n, _ in CHEATS
        if c.__name__
        not in {
            "finishes_on_another_thread",
            "returns_a_lazy_container",
            "never_writes",
            "searches_memory",
        }
    ],
)
def test_each_cheat_looks_right_on_its_own(cheat: Any, name: str) -> None:
    """Without the probes these would pass: one plain call gives the right numbers."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(5))
    want = honest(x)
    output = cheat()(x)
    plain = output.as_subclass(torch.Tensor) if name == "output_type" else output
    close = compare(plain, want)
    assert close.passed or close.failed == 1  # the unwritten tail may hold anything


def test_a_buffer_that_is_reused_from_the_third_call_on_is_caught(probe: Any) -> None:
    """As graph-captured callables do it: two warm-up calls, then one static output."""
    static: list[torch.Tensor] = []
    calls: list[int] = []

    def candidate(x: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        output = honest(x)
        if len(calls) == 2:
            static.append(output)
        return static[0].copy_(output * 1.001) if len(calls) > 2 else output

    assert "two_outputs_held" in probe(candidate)

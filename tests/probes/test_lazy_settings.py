"""What torch decides by itself at first use is nobody's tampering; what a candidate does is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from pytest_fastlayer.probes import Watch, lazy

NOTED, DECIDED, OTHER = [1, 2, 0, 3, 4], [3, 1, 2, 0, 4], [2, 1, 0, 3, 4]


class Hopper:
    """CUDA as this machine's torch would see it on a Hopper GPU: up or not, decided or not."""

    def __init__(self) -> None:
        self.up = self.decided = False
        self.queue: list[Callable[[], None]] = []

    def attention(self) -> None:
        """The first scaled_dot_product_attention of the process puts cuDNN first."""
        self.come_up()
        if not self.decided:
            self.decided = True
            torch._C._set_sdp_priority_order(DECIDED)

    def come_up(self) -> None:
        if not self.up:
            self.up = True
            for call in self.queue:
                call()

    def lazy_call(self, call: Callable[[], None]) -> None:
        if self.up:
            call()
        else:
            self.queue.append(call)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hopper]:
    gpu = Hopper()
    kept = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(NOTED)
    monkeypatch.setattr(lazy, "_decision", lazy._Decision())
    monkeypatch.setattr(lazy, "_ask_torch", gpu.attention)
    monkeypatch.setattr(torch.cuda, "_lazy_call", gpu.lazy_call)
    yield gpu
    torch._C._set_sdp_priority_order(kept)


def order_changed(watch: Watch) -> bool:
    found = watch.changes()
    assert all(one.startswith(lazy.ORDER) for one in found), found
    return bool(found)


@pytest.mark.parametrize("up", [True, False], ids=["CUDA is up", "CUDA comes up later"])
def test_torchs_own_decision_is_no_change(hopper: Hopper, up: bool) -> None:
    hopper.up = up
    watch = Watch()
    assert hopper.up is up  # a watch never brings CUDA up
    hopper.attention()
    assert torch._C._get_sdp_priority_order() == DECIDED
    assert not order_changed(watch)
    assert not order_changed(Watch())


@pytest.mark.parametrize("up", [True, False], ids=["CUDA is up", "CUDA comes up later"])
@pytest.mark.parametrize("order", [NOTED, OTHER], ids=["back to what was noted", "another"])
def test_a_candidate_that_changes_the_order_is_caught(
    hopper: Hopper, up: bool, order: list[int]
) -> None:
    hopper.up = up
    watch = Watch()
    hopper.attention()
    torch._C._set_sdp_priority_order(order)
    assert order_changed(watch)


def test_a_change_before_cuda_comes_up_is_caught(hopper: Hopper) -> None:
    watch = Watch()
    torch._C._set_sdp_priority_order(OTHER)
    hopper.attention()
    assert order_changed(watch)


def test_an_order_that_the_test_itself_set_must_stay(hopper: Hopper) -> None:
    hopper.attention()
    torch._C._set_sdp_priority_order(NOTED)  # wanted so, in a conftest, after torch had decided
    watch = Watch()
    assert not order_changed(watch)
    torch._C._set_sdp_priority_order(DECIDED)
    assert order_changed(watch)


def test_torch_is_asked_once(hopper: Hopper) -> None:
    for _ in range(3):
        Watch()
    assert len(hopper.queue) == 1


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, TypeError, AttributeError])
def test_a_backend_that_cannot_be_chosen_is_no_error(
    hopper: Hopper, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse() -> None:
        raise error("No available kernel. Aborting execution.")

    monkeypatch.setattr(lazy, "_ask_torch", refuse)
    hopper.up = True
    watch = Watch()
    assert not order_changed(watch)


SCRIPT = """
import torch
from torch.nn.functional import scaled_dot_product_attention
from pytest_fastlayer.probes import Watch

if {up}:
    torch.cuda.init()
watch = Watch()
assert torch.cuda.is_initialized() is {up}
for dtype in (torch.float32, torch.float16):
    x = torch.randn(1, 2, 64, 64, dtype=dtype, device="cuda")
    scaled_dot_product_attention(x, x, x, is_causal=True)
assert watch.changes() == [], watch.changes()
order = torch._C._get_sdp_priority_order()
torch._C._set_sdp_priority_order([*order[1:], order[0]])
assert len(watch.changes()) == 1
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("up", [True, False])
def test_a_first_attention_on_a_real_gpu_is_no_change(up: bool) -> None:
    """In a process of its own: torch decides once."""
    script = SCRIPT.format(up=up)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

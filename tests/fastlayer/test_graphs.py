"""Captured graphs without a device: who owns them, and when they may go."""

from __future__ import annotations

import pytest
import torch

from fastlayer import graphs


class Graph:
    """Stands for a CUDA graph."""


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the stream is being captured, or why that cannot be told."""
    now = [False]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[-1])
    monkeypatch.setattr(graphs, "_POSTPONED", [])
    return now


def test_a_graph_goes_with_its_owner(capturing: list[bool]) -> None:
    owned = graphs._Owned()
    del owned
    assert graphs._POSTPONED == []


def test_a_graph_that_loses_its_owner_during_a_capture_stays_until_the_next(
    capturing: list[bool],
) -> None:
    owned = graphs._Owned()
    graph = owned.graph
    capturing[0] = True
    del owned
    (kept,) = graphs._POSTPONED
    assert kept is graph
    capturing[0] = False
    graphs._Owned()
    assert graphs._POSTPONED == []


def test_an_owner_that_goes_at_exit_is_silent(
    capturing: list[bool], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def unloading() -> bool:
        raise RuntimeError("driver shutting down")

    owned = graphs._Owned()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", unloading)
    del owned
    assert not [each for each in recwarn if "unraisable" in str(each.category).lower()]


def test_a_body_that_is_not_staged_is_copied_around() -> None:
    body = graphs._Copied(lambda x, mask: x * 2 if mask is None else x * mask)
    x = torch.arange(3.0)
    state = body.enter(x)
    body.inside(state, None)
    first = body.leave(state, None)
    assert body.enter(-x, state) is state
    body.inside(state, torch.tensor([1, 0, 1]))
    out = torch.empty(3)
    assert body.leave(state, None, out) is out
    assert first.tolist() == [0, 2, 4]
    assert out.tolist() == [0, 0, -2]
    assert body(x, None).tolist() == [0, 2, 4]

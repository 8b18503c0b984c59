"""The part of a large output that the side-stream probe copies."""

from __future__ import annotations

import pytest
import torch

from pytest_fastlayer.probes import streams


@pytest.mark.parametrize(("rows", "copied"), [(4, 4), (8, 8), (9, 8), (100, 8)])
def test_only_the_end_of_a_large_output_is_copied(
    monkeypatch: pytest.MonkeyPatch, rows: int, copied: int
) -> None:
    monkeypatch.setattr(streams, "COPIED_BYTES", 8 * 4 * 5)
    tensor = torch.arange(rows * 5.0).reshape(rows, 5)
    end = streams.last_rows(tensor)
    assert torch.equal(end, tensor[-copied:])
    assert streams.last_rows(torch.tensor(1.0)).dim() == 0

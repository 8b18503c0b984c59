"""Masks are classified by value, and read again only when they may have changed."""

from __future__ import annotations

import pytest
import torch
from layer_support import masks

from fastlayer import MaskKind
from fastlayer import masks as masks_module
from fastlayer.masks import MaskClassifier, classify

KINDS = {
    "none": MaskKind.NONE,
    "full": MaskKind.FULL,
    "right_padded": MaskKind.RIGHT_PADDED,
    "empty_sample": MaskKind.RIGHT_PADDED,
    "left_padded": MaskKind.IRREGULAR,
    "holed": MaskKind.IRREGULAR,
    "holed_and_empty": MaskKind.IRREGULAR,
}


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_kinds(name, kind):
    assert classify(masks(4, 17)[name]) is kind


def test_length_one():
    assert classify(torch.tensor([[True], [True]])) is MaskKind.FULL
    assert classify(torch.tensor([[True], [False]])) is MaskKind.RIGHT_PADDED


def test_only_the_last_two_kinds_mask():
    assert [kind.masks for kind in MaskKind] == [False, False, True, True]


@pytest.fixture
def readings(monkeypatch):
    seen = []

    def counting(mask):
        seen.append(mask)
        return classify(mask)

    monkeypatch.setattr(masks_module, "classify", counting)
    return seen


def test_an_unchanged_mask_is_read_once(readings):
    remember = MaskClassifier()
    mask = torch.ones(2, 5, dtype=torch.bool)
    assert [remember(mask) for _ in range(3)] == [MaskKind.FULL] * 3
    assert len(readings) == 1


def test_a_write_or_another_object_is_read_again(readings):
    remember = MaskClassifier()
    mask = torch.ones(2, 5, dtype=torch.bool)
    remember(mask)
    mask[0, 2] = False
    assert remember(mask) is MaskKind.IRREGULAR
    mask[0, 2:] = False
    assert remember(mask) is MaskKind.RIGHT_PADDED
    assert remember(mask.clone()) is MaskKind.RIGHT_PADDED
    assert len(readings) == 4


def test_a_view_and_its_base_share_their_version(readings):
    remember = MaskClassifier()
    base = torch.ones(2, 5, dtype=torch.bool)
    view = base[:1]
    assert remember(view) is MaskKind.FULL
    base[0, 1:] = False
    assert remember(view) is MaskKind.RIGHT_PADDED


def test_an_inference_tensor_is_read_every_time(readings):
    remember = MaskClassifier()
    with torch.inference_mode():
        mask = torch.ones(2, 5, dtype=torch.bool)
        assert remember(mask) is MaskKind.FULL
        mask[1, 1] = False
        assert remember(mask) is MaskKind.IRREGULAR
        assert remember(mask) is MaskKind.IRREGULAR
    assert len(readings) == 3


def test_the_last_mask_is_not_kept_alive():
    remember = MaskClassifier()
    mask = torch.ones(2, 5, dtype=torch.bool)
    remember(mask)
    del mask
    fresh = torch.zeros(2, 5, dtype=torch.bool)
    assert remember(fresh) is MaskKind.RIGHT_PADDED

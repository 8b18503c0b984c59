"""Stress grids: parametrisation helpers for tests that must hold beyond one draw of the inputs."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

#: What a kernel meets in practice: no padding to nearly all, and a third to three times the scale.
PADDING_RATIOS = (0.0, 0.1, 0.5, 0.9)
INPUT_SCALES = (1 / 3, 1.0, 3.0)


def padding_ratios(values: Iterable[float] = PADDING_RATIOS) -> pytest.MarkDecorator:
    """Run a test once per ``padding_ratio``: the share of each sample that may be padding.

    Raises ValueError unless every ratio is in [0, 1).
    """
    ratios = tuple(values)
    for ratio in ratios:
        if not 0 <= ratio < 1:
            raise ValueError(f"padding_ratio {ratio!r}: expected a share in [0, 1)")
    return pytest.mark.parametrize("padding_ratio", ratios, ids=[f"pad{r:g}" for r in ratios])


def input_scales(values: Iterable[float] = INPUT_SCALES) -> pytest.MarkDecorator:
    """Run a test once per ``input_scale``, a factor on inputs of unit variance.

    Raises ValueError unless every scale is positive.
    """
    scales = tuple(values)
    for scale in scales:
        if not scale > 0:
            raise ValueError(f"input_scale {scale!r}: expected a positive factor")
    return pytest.mark.parametrize("input_scale", scales, ids=[f"scale{s:.3g}" for s in scales])

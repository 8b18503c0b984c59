"""Classification of valid-token masks by value: the only place that reads a mask on the host."""

from __future__ import annotations

import weakref
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class MaskKind(StrEnum):
    """What a ``[B, N]`` mask asks of attention, from nothing to everything."""

    NONE = "none"
    FULL = "full"
    RIGHT_PADDED = "right_padded"
    IRREGULAR = "irregular"

    @property
    def masks(self) -> bool:
        """Whether some token is invalid."""
        return self in (MaskKind.RIGHT_PADDED, MaskKind.IRREGULAR)


def classify(mask: torch.Tensor | None) -> MaskKind:
    """The kind of a bool mask ``[B, N]``, by value; on an accelerator this synchronises once.

    An empty sample counts as right-padded, with length zero.
    """
    if mask is None:
        return MaskKind.NONE
    some_invalid = mask.logical_not().any()
    resumes = (mask[:, 1:] & ~mask[:, :-1]).any()
    code = int(some_invalid.int() + resumes.int())
    return (MaskKind.FULL, MaskKind.RIGHT_PADDED, MaskKind.IRREGULAR)[code]


class MaskClassifier:
    """Remembers the kind of the last mask while the object and its version are unchanged.

    A tensor made in inference mode has no version counter, so it is read again on every call.
    Writes through ``mask.data`` or by another library escape version counters; pass a new tensor
    object after such a write.
    """

    def __init__(self) -> None:
        self._mask: weakref.ref[torch.Tensor] | None = None
        self._version = -1
        self._kind = MaskKind.NONE

    def __call__(self, mask: torch.Tensor | None) -> MaskKind:
        if mask is None:
            return MaskKind.NONE
        known = self.known(mask)
        if known is not None:
            return known
        kind = classify(mask)
        if not mask.is_inference():
            self._mask, self._version, self._kind = weakref.ref(mask), mask._version, kind
        return kind

    def known(self, mask: torch.Tensor) -> MaskKind | None:
        """The kind of this very mask if it was classified and not written since, else None."""
        if self._mask is None or self._mask() is not mask or mask._version != self._version:
            return None
        return self._kind

"""A setting that torch decides by itself at its first use, decided before it is noted.

The first ``scaled_dot_product_attention`` on a CUDA device may put cuDNN first in the process-wide
order of SDPA backends: ``priority_order`` in torch's
``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, once a process, on compute capability 9
or 10 with a recent cuDNN. Whoever happens to make that first call has tampered with nothing. So
torch is asked to choose a backend, which runs no kernel, as soon as CUDA is up and before any arm
can; CUDA itself is never brought up for it.

Other settings under watch need no such care: the number of threads and the preferred BLAS library
are lazy too, but reading them decides them, and the rest are plain flags.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

#: Its name among the settings of ``state``.
ORDER = "the order of SDPA backends"


@dataclass
class _Decision:
    """The order before and after torch was asked; None while it has not been."""

    queued: bool = False
    orders: tuple[object, object] | None = None


_decision = _Decision()


def _ask_torch() -> None:
    """Have a backend chosen for a call that every backend could serve."""
    with warnings.catch_warnings(), _disable_current_modes():
        warnings.simplefilter("ignore")  # of all backends, why it cannot: none may be enabled
        query = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="cuda")
        torch._fused_sdp_choice(query, query, query)


def _decide() -> None:
    before = torch._C._get_sdp_priority_order()
    # No memory, no backend, a release that asks otherwise: torch has then decided, or will later.
    # Within CUDA's initialisation an exception would be everybody's.
    with suppress(RuntimeError, TypeError, AttributeError):
        _ask_torch()
    _decision.orders = (before, torch._C._get_sdp_priority_order())


def is_decided() -> bool:
    """Whether the order is torch's final one; sees to it that it will be once CUDA comes up."""
    if _decision.orders is None and not _decision.queued:
        _decision.queued = True
        torch.cuda._lazy_call(_decide)  # at once where CUDA is up
    return _decision.orders is not None


def as_decided(noted: Mapping[str, object]) -> dict[str, object]:
    """Settings that were noted before the decision, with what torch has decided since.

    Only where the order was still the noted one when torch decided: else somebody had changed it.
    """
    settings = dict(noted)
    if _decision.orders is not None:
        before, after = _decision.orders
        if settings.get(ORDER) == before:
            settings[ORDER] = after
    return settings

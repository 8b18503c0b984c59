"""Both arms' weights, changed in place and put back: does the candidate follow?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: Weights are multiplied by this: far beyond any tolerance where a weight matters at all, and
#: small enough to overflow nothing.
WEIGHT_SCALE = 1.25

ModulePair = tuple[torch.nn.Module, torch.nn.Module]


def module_pair(reference: object, candidate: object) -> ModulePair | None:
    """The two arms, if both are modules (a frozen one counts as what it froze)."""
    candidate = getattr(candidate, "target", candidate)
    if isinstance(reference, torch.nn.Module) and isinstance(candidate, torch.nn.Module):
        return reference, candidate
    return None


def common_weights(pair: ModulePair) -> list[torch.nn.Parameter]:
    """Floating parameters of the same name and shape in both modules, each storage once.

    Names under torch.compile's wrapper (``_orig_mod.``) are read as without it.
    """
    reference, candidate = (
        {name.replace("_orig_mod.", ""): weight for name, weight in module.named_parameters()}
        for module in pair
    )
    found: dict[tuple[str, int], torch.nn.Parameter] = {}
    for name, weight in reference.items():
        other = candidate.get(name)
        if other is None or other.shape != weight.shape or not weight.is_floating_point():
            continue
        for one in (weight, other):
            found[str(one.device), one.data_ptr()] = one
    return list(found.values())


@contextmanager
def scaled(weights: list[torch.nn.Parameter]) -> Iterator[None]:
    """The weights times ``WEIGHT_SCALE`` for the duration, then bit for bit as they were."""
    saved = [weight.detach().clone() for weight in weights]
    try:
        for weight, old in zip(weights, saved, strict=True):
            _set(weight, old * WEIGHT_SCALE)
        yield
    finally:
        for weight, old in zip(weights, saved, strict=True):
            _set(weight, old)


def _set(weight: torch.nn.Parameter, value: torch.Tensor) -> None:
    with torch.inference_mode() if weight.is_inference() else torch.no_grad():
        weight.copy_(value)

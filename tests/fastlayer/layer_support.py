"""What the fastlayer tests share: small configurations, models, and the acceptance rule."""

from __future__ import annotations

from dataclasses import replace

import torch

from fastlayer import FastTransformer, ReferenceTransformer, TransformerConfig
from fastlayer.inputs import BASE_SEED

ATOL, RTOL = 0.002, 0.02

SMALL = TransformerConfig(
    batch_size=3, seq_len=24, d_model=32, num_heads=4, ffn_dim=48, num_layers=2, causal=True
)


def small(**changes: object) -> TransformerConfig:
    return replace(SMALL, **changes)  # type: ignore[arg-type]


def make_reference(
    config: TransformerConfig, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> ReferenceTransformer:
    torch.manual_seed(BASE_SEED)
    return ReferenceTransformer(config).eval().to(device=device, dtype=dtype)


def make_pair(
    config: TransformerConfig, device: str = "cpu", **options: object
) -> tuple[ReferenceTransformer, FastTransformer]:
    """A reference and a fast model that shares its parameters."""
    reference = make_reference(config, device)
    options.setdefault("policy", "eligible")
    return reference, FastTransformer.from_reference(reference, **options)


def assert_accepted(candidate: torch.Tensor, reference: torch.Tensor) -> None:
    """The acceptance rule per element; a non-finite candidate never passes."""
    assert candidate.shape == reference.shape
    assert candidate.dtype == reference.dtype
    assert candidate.device == reference.device
    assert torch.isfinite(candidate).all(), "the candidate holds NaN or inf"
    difference = (candidate.double() - reference.double()).abs()
    bound = (RTOL * reference.double().abs()).clamp_min(ATOL)
    budget = (difference / bound).max().item() if difference.numel() else 0.0
    assert budget <= 1.0, f"the worst element uses {budget:.2f} of its tolerance"


def masks(batch: int, tokens: int, device: str = "cpu") -> dict[str, torch.Tensor | None]:
    """One mask of each kind that ever broke an implementation."""
    positions = torch.arange(tokens, device=device)
    lengths = torch.linspace(max(1, tokens // 3), tokens, batch, device=device).long()
    right = positions[None, :] < lengths[:, None]
    empty = right.clone()
    empty[0] = False
    left = right.flip(1)
    holed = torch.ones(batch, tokens, dtype=torch.bool, device=device)
    holed[:, 1::3] = False
    mixed = holed.clone()
    mixed[-1] = False
    return {
        "none": None,
        "full": torch.ones(batch, tokens, dtype=torch.bool, device=device),
        "right_padded": right,
        "empty_sample": empty,
        "left_padded": left,
        "holed": holed,
        "holed_and_empty": mixed,
    }

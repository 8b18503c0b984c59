"""Models, masks and the acceptance rule for the tests of this folder."""

from __future__ import annotations

import torch

from fastlayer import ReferenceTransformer, TransformerConfig

ATOL, RTOL = 0.002, 0.02


def reference(config: TransformerConfig, biases: bool = True) -> ReferenceTransformer:
    """Default weights; biases and norms disturbed, so that a forgotten one would show."""
    torch.manual_seed(1234)
    model = ReferenceTransformer(config).eval()
    if biases:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.requires_grad_(False)


def inputs(config: TransformerConfig, seed: int = 1234) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(config.batch_size, config.seq_len, config.d_model, generator=generator)


def masks(batch: int, tokens: int) -> dict[str, torch.Tensor | None]:
    """Every kind of mask, with empty samples and samples of one token among them."""
    positions = torch.arange(tokens)
    lengths = torch.linspace(1, tokens, batch).long()
    right = positions[None] < lengths[:, None]
    empty = right.clone()
    empty[0] = False
    holed = torch.ones(batch, tokens, dtype=torch.bool)
    holed[:, 1::3] = False
    mixed = holed.clone()
    mixed[-1] = False
    return {
        "none": None,
        "full": torch.ones(batch, tokens, dtype=torch.bool),
        "right_padded": right,
        "empty_sample": empty,
        "left_padded": right.flip(1),
        "holed": holed,
        "holed_and_empty": mixed,
    }


def budget(candidate: torch.Tensor, expected: torch.Tensor) -> float:
    """The worst element's share of its tolerance; infinite where the candidate is not finite."""
    assert candidate.shape == expected.shape
    assert candidate.dtype == expected.dtype
    if not candidate.isfinite().all():
        return float("inf")
    bound = (RTOL * expected.double().abs()).clamp_min(ATOL)
    return float(((candidate.double() - expected.double()).abs() / bound).max())

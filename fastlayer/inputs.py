"""The disclosed inputs: seeded standard normal values, with right padding on request."""

from __future__ import annotations

import torch

from fastlayer.config import TransformerConfig

#: Seed of the weights, and of trial 0's inputs.
BASE_SEED = 1234


def make_inputs(
    config: object,
    seed: int,
    device: torch.device | str = "cpu",
    padding_ratio: float = 0.0,
    input_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``x [B, N, d_model]`` and its bool mask ``[B, N]``, or None where nothing is padded.

    Values are drawn by a generator on ``device`` seeded with ``seed`` (1234 + trial by custom) and
    multiplied by ``input_scale``. With a ``padding_ratio`` above zero each sample's length is
    uniform in ``[max(1, round(N * (1 - padding_ratio))), N]``; the rest of the sample is padding,
    where x is zero.

    Raises:
        ValueError: ``padding_ratio`` is outside [0, 1).
    """
    if not 0.0 <= padding_ratio < 1.0:
        raise ValueError(f"padding_ratio: given {padding_ratio}; expected a value in [0, 1)")
    shape = TransformerConfig.of(config)
    batch, tokens = shape.batch_size, shape.seq_len
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(batch, tokens, shape.d_model, generator=generator, device=device, dtype=dtype)
    x.mul_(input_scale)
    if padding_ratio == 0.0:
        return x, None
    shortest = max(1, round(tokens * (1.0 - padding_ratio)))
    lengths = torch.randint(shortest, tokens + 1, (batch,), generator=generator, device=device)
    mask = torch.arange(tokens, device=device)[None, :] < lengths[:, None]
    return x.masked_fill_(~mask[:, :, None], 0.0), mask

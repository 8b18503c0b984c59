"""The fourteen disclosed shapes, as data. All are causal and float32."""

from __future__ import annotations

from fastlayer.config import TransformerConfig

# id: (B, N, d_model, H, FFN, L, regime)
_ROWS: dict[int, tuple[int, int, int, int, int, int, str]] = {
    1: (64, 128, 128, 4, 128, 4, "launch/memory-bound"),
    2: (1, 128, 128, 4, 128, 4, "launch-bound"),
    3: (4, 128, 128, 4, 128, 4, "launch-bound"),
    4: (16, 128, 128, 4, 128, 4, "launch-bound"),
    5: (128, 128, 128, 4, 128, 4, "memory-bound"),
    6: (10_000, 128, 128, 4, 128, 4, "capacity-bound (extreme batch)"),
    7: (64, 128, 32, 4, 32, 4, "launch-bound, head_dim 8"),
    8: (64, 128, 1024, 4, 1024, 4, "projection-bound, head_dim 256"),
    9: (64, 128, 128, 1, 128, 4, "single head, head_dim 128"),
    10: (64, 128, 128, 2, 128, 4, "two heads, head_dim 64"),
    11: (64, 128, 128, 16, 128, 4, "sixteen heads, head_dim 8"),
    12: (64, 32, 128, 4, 128, 4, "launch-bound, short sequence"),
    13: (64, 1024, 128, 4, 128, 4, "memory-bound long sequence"),
    14: (32, 100_000, 1024, 16, 1024, 2, "infeasible dense (extreme context)"),
}

CASES: dict[int, TransformerConfig] = {
    case: TransformerConfig(
        batch_size=batch,
        seq_len=seq,
        d_model=width,
        num_heads=heads,
        ffn_dim=ffn,
        num_layers=layers,
        causal=True,
    )
    for case, (batch, seq, width, heads, ffn, layers, _) in _ROWS.items()
}

REGIMES: dict[int, str] = {case: row[-1] for case, row in _ROWS.items()}

_CASE_OF: dict[TransformerConfig, int] = {config: case for case, config in CASES.items()}


def case_of(config: TransformerConfig) -> int | None:
    """The id of the disclosed case with exactly this tuple, or None."""
    return _CASE_OF.get(config)

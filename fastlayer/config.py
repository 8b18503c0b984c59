"""The shape of the Transformer and what follows from it: sizes, operations, bytes."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from fastlayer.errors import ConfigError, InputError

SIZE_RULE = "it must be an integer of at least 1"

_SIZE_FIELDS = ("batch_size", "seq_len", "d_model", "num_heads", "ffn_dim", "num_layers")


def as_size(value: Any) -> int | None:
    """An integer of any type (NumPy's too) of at least 1 as an ``int``, or None; no bool is one."""
    if isinstance(value, bool):
        return None
    try:
        size = operator.index(value)
    except TypeError:
        return None
    return size if size >= 1 else None


def workspace_size(value: Any) -> int:
    """``value`` as a number of bytes.

    Raises:
        InputError: it is no integer of at least 1.
    """
    size = as_size(value)
    if size is None:
        raise InputError(
            "workspace_bytes", f"{value!r}", "an integer of at least 1", "Pass a number of bytes."
        )
    return size


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """The disclosed tuple (B, N, d_model, H, FFN, causal, L).

    Raises:
        ConfigError: a size is not a positive integer, ``causal`` is not a bool, or ``d_model`` is
            not a multiple of ``num_heads``.
    """

    batch_size: int
    seq_len: int
    d_model: int
    num_heads: int
    ffn_dim: int
    num_layers: int
    causal: bool = True

    def __post_init__(self) -> None:
        for name in _SIZE_FIELDS:
            value = getattr(self, name)
            size = as_size(value)
            if size is None:
                raise ConfigError(name, value, SIZE_RULE)
            object.__setattr__(self, name, size)
        if not isinstance(self.causal, bool):
            raise ConfigError("causal", self.causal, "it must be True or False")
        if self.d_model % self.num_heads:
            raise ConfigError(
                "d_model", self.d_model, f"it must be a multiple of num_heads = {self.num_heads}"
            )

    @classmethod
    def of(cls, config: object) -> TransformerConfig:
        """The same tuple read from any object that carries these attributes.

        Raises:
            ConfigError: an attribute is missing or breaks its rule.
        """
        if isinstance(config, cls):
            return config
        missing = object()
        values: dict[str, object] = {}
        for name in (*_SIZE_FIELDS, "causal"):
            value = getattr(config, name, missing)
            if value is missing:
                raise ConfigError(
                    name, None, f"the {type(config).__name__} given has no such attribute"
                )
            values[name] = value
        return cls(**values)  # type: ignore[arg-type]

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def tokens(self) -> int:
        """Tokens of the whole batch, B * N."""
        return self.batch_size * self.seq_len

    @property
    def activation_elements(self) -> int:
        """Elements of one ``[B, N, d_model]`` activation, the input's and the output's size."""
        return self.tokens * self.d_model

    @property
    def score_elements(self) -> int:
        """Elements of one layer's dense score tensor ``[B, H, N, N]``."""
        return self.batch_size * self.num_heads * self.seq_len**2

    @property
    def parameter_count(self) -> int:
        attention = 4 * (self.d_model**2 + self.d_model)
        ffn = 2 * self.d_model * self.ffn_dim + self.ffn_dim + self.d_model
        norms = 2 * 2 * self.d_model
        return self.num_layers * (attention + ffn + norms) + 2 * self.d_model

    @property
    def projection_flops(self) -> int:
        """Floating-point operations of every linear layer, two per multiply-add."""
        per_token = 4 * self.d_model**2 + 2 * self.d_model * self.ffn_dim
        return 2 * self.num_layers * self.tokens * per_token

    @property
    def attention_flops(self) -> int:
        """Floating-point operations of q k^T and p v as dense arithmetic does them (unskipped)."""
        return 2 * 2 * self.num_layers * self.score_elements * self.head_dim

    @property
    def flops(self) -> int:
        return self.projection_flops + self.attention_flops

    @property
    def minimal_flops(self) -> int:
        """Floating-point operations that a forward's result requires, two per multiply-add.

        Every linear layer, ``2 L B N (4 d^2 + 2 d FFN)``, and q k^T and p v over the visible
        (query, key) pairs alone: ``4 L B d P``, with ``P = N (N + 1) / 2`` under a causal mask,
        which hides the upper triangle, and ``N^2`` without one. The halving is how causal
        attention's throughput is stated since FlashAttention-2 (Dao 2023, sec. 4.1), here with the
        diagonal, which is visible. Normalisation, softmax, GELU and residuals, a few operations
        an element, are left out, as is usual (Kaplan et al. 2020, sec. 2.1).
        """
        pairs = self.seq_len * (self.seq_len + 1) // 2 if self.causal else self.seq_len**2
        attention = 4 * self.num_layers * self.batch_size * self.d_model * pairs
        return self.projection_flops + attention

    def minimal_bytes(self, itemsize: int = 4) -> int:
        """Bytes that must cross the memory bus: input, output and each parameter once."""
        return (2 * self.activation_elements + self.parameter_count) * itemsize

    def activation_bytes(self, itemsize: int = 4) -> int:
        return self.activation_elements * itemsize

    def score_bytes(self, itemsize: int = 4) -> int:
        """Bytes of one layer's dense score tensor at ``itemsize`` bytes an element."""
        return self.score_elements * itemsize

    def dense_bytes(self, itemsize: int = 4) -> int:
        """Peak bytes of the dense path above parameters and input.

        The peak lies in attention, where two score tensors are alive at once (scaling or masking
        one makes another; the softmax reads one and writes one, in float32, beside the scores
        themselves where those are not), with about six activations: residual, normalised input,
        q, k, v and output.
        """
        per_score = 2 * itemsize if itemsize == 4 else max(2 * itemsize, itemsize + 2 * 4)
        ffn = self.tokens * self.ffn_dim * itemsize
        return self.score_elements * per_score + 6 * self.activation_bytes(itemsize) + 2 * ffn

    def linear_bytes(self, itemsize: int = 4) -> int:
        """Peak bytes, above parameters and input, of a path that never holds the scores.

        Residual and normalised input, beside either packed q, k, v with the context, or two hidden
        FFN tensors with the result.
        """
        activation = self.activation_bytes(itemsize)
        hidden = self.tokens * self.ffn_dim * itemsize
        return 2 * activation + max(4 * activation, 2 * hidden + activation)

    def label(self) -> str:
        """The tuple as people write it, for messages and reports."""
        return (
            f"B={self.batch_size} N={self.seq_len} d={self.d_model} H={self.num_heads} "
            f"FFN={self.ffn_dim} L={self.num_layers} {'causal' if self.causal else 'full'}"
        )

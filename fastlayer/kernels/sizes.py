"""The sizes a fused kernel is specialised to, and how they are padded for the matrix units."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Narrowest operand dimension of a 16-bit matrix instruction along its contraction.
NARROWEST = 16

#: What ``products.attend`` takes: tokens of a sequence, whose scores are one tile, and a divisor of
#: head_dim. Compilers have mistaken asynchronous products that are 16 or 32 columns wide.
ATTEND_TOKENS = 128
ATTEND_COLUMNS = 64


def attends(tokens: int, head_dim: int) -> bool:
    """Whether ``products.attend`` takes such sequences and heads."""
    return tokens <= ATTEND_TOKENS and head_dim % ATTEND_COLUMNS == 0


def power_of_two(value: int) -> int:
    """The least power of two that is not below ``value`` (at least 1)."""
    return 1 << max(0, value - 1).bit_length()


@dataclass(frozen=True, slots=True)
class FusedSizes:
    """A model and its input as the fused kernels see them.

    Activations are padded to ``width`` columns, heads to groups of ``group_width`` columns, and the
    hidden layer to ``hidden`` columns; the padding carries zero weights, so it never changes a
    result. Two heads of eight share a group: a contraction is at least sixteen wide, and each head
    of a pair takes its own half of it by masking the query. With a ``narrowest_head`` of sixteen,
    heads are padded instead of paired.
    """

    batch: int
    tokens: int
    d_model: int
    num_heads: int
    ffn_dim: int
    num_layers: int
    causal: bool
    narrowest_head: int = 8

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def score_scale(self) -> float:
        """From a product of q and k to a score in powers of two: ``head_dim**-0.5 log2(e)``."""
        return math.log2(math.e) / math.sqrt(self.head_dim)

    @property
    def width(self) -> int:
        """Columns of the residual tile."""
        return max(NARROWEST, power_of_two(self.d_model))

    @property
    def padded_head(self) -> int:
        """Columns of one head: a power of two, at least ``narrowest_head``."""
        return max(self.narrowest_head, power_of_two(self.head_dim))

    @property
    def heads_per_group(self) -> int:
        return max(1, NARROWEST // self.padded_head)

    @property
    def group_width(self) -> int:
        return self.padded_head * self.heads_per_group

    @property
    def groups(self) -> int:
        """Head groups that hold at least one real head."""
        return -(-self.num_heads // self.heads_per_group)

    @property
    def heads_width(self) -> int:
        """Columns of each of Q, K and V: the groups padded to a power of two."""
        return power_of_two(self.groups) * self.group_width

    @property
    def hidden(self) -> int:
        """Columns of the hidden layer: a power of two up to 64, multiples of 64 beyond."""
        if self.ffn_dim <= 64:
            return max(NARROWEST, power_of_two(self.ffn_dim))
        return -(-self.ffn_dim // 64) * 64

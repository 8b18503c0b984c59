"""What float16 makes of a block, told by its weights before any input is seen; and exact mends.

LayerNorm's output n has ``|n| <= sqrt(d)`` and about unit variance. So element r of ``W n + b``

    never exceeds   |W_r| sqrt(d) + |b_r|        norms of rows; no partial sum exceeds it either
    typically is    sqrt(|W_r|^2 + b_r^2)

Out of range is an element that may exceed ``LARGEST``; small are entries so far below one that
float16's subnormals, 2**-24 apart, cost them precision. Four mends leave the function as it is:

    Q and K     share each channel's magnitude: Q by 2**-e and K by 2**e
    V and Wo    likewise, for attention is linear in V
    K's bias    is dropped: it adds one number to all scores of a query, and softmax ignores it
    V's bias    joins that of Wo, for it goes through attention unchanged (weights sum to one)

The biases only where they dwarf what they are added to, and would take its digits in rounding. An
ordinary channel keeps them and has ``e = 0``: its numbers stay as they are, bit for bit. The hidden
layer cannot be mended so, because GELU is not linear; it fits or it does not.

Large scores, by weights or by a bias of Q, lose what eleven bits of q and k lose, TF32's as well as
float16's: the reference itself, run in TF32, is then as far from its function as the kernels are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

#: Half of float16's largest: the rest is a margin for what rounding adds.
LARGEST = 2.0**15

#: Root mean square of a row's entries from which on subnormals cost it precision. At half of it a
#: model's error is 1.07 times what it was, at a quarter 1.14 times.
SMALLEST = 2.0**-13

#: A bias of K or V counts as large beyond this many times the deviation of what it is added to.
_DWARFS = 4.0

#: Relative error of rounding to eleven bits, and absolute error among subnormals; mean squares.
_ROUNDING = (2.0**-10 * 0.735) ** 2 / 12
_SUBNORMAL = 2.0**-48 / 12

#: How much larger subnormals may make the error of a block's update (its mean square, by output).
_EXCESS = 1.25

#: An error below this is lost in what follows: LayerNorm's epsilon lets it grow 316 times at most.
_NEGLIGIBLE = 2.0**-20

#: Rows that are measured at once, of float64 copies.
_ROWS = 1024


class Affine(NamedTuple):
    """``W x + b``: ``weight [out, in]`` and ``bias [out]``, float64."""

    weight: torch.Tensor
    bias: torch.Tensor

    @property
    def largest(self) -> torch.Tensor:
        """``[out]``: the largest magnitude of an element where x is a normalised row."""
        return _norms(self.weight) * math.sqrt(self.weight.shape[1]) + self.bias.abs()

    @property
    def typical(self) -> torch.Tensor:
        """``[out]``: the root mean square of an element where x is a normalised row."""
        return torch.hypot(_norms(self.weight), self.bias)

    def scaled(self, exponents: torch.Tensor) -> Affine:
        """Element r times ``2**exponents[r]``."""
        factors = exponents.exp2()
        return Affine(self.weight * factors[:, None], self.bias * factors)


class _Range(NamedTuple):
    """By channel ``[C]``: the largest magnitude of anything, and the weights' root mean square."""

    largest: torch.Tensor
    typical: torch.Tensor


@dataclass(frozen=True, slots=True)
class Block:
    """One block, its norms folded: ``q``, ``k``, ``v`` and ``ffn_in`` read normalised rows."""

    q: Affine
    k: Affine
    v: Affine
    out: Affine
    ffn_in: Affine
    ffn_out: Affine

    def mended(self) -> Block:
        """The same function in operands that fit float16 where they can; see the module."""
        k, v = _without(self.k, _dwarfing(self.k)), _without(self.v, _dwarfing(self.v))
        out = self.out._replace(bias=self.out.bias + self.out.weight @ _dwarfing(self.v))
        shared = _exponents(_produced(self.q), _produced(k))
        passed = _exponents(_produced(v), _consumed(out))
        return replace(
            self,
            q=self.q.scaled(-shared),
            k=k.scaled(shared),
            v=v.scaled(-passed),
            out=out._replace(weight=out.weight * passed.exp2()),
        )

    def fits(self) -> bool:
        """Whether nothing can leave float16's range, nor the hidden layer its precision."""
        produced = (self.q, self.k, self.v, self.ffn_in)
        bounds = [affine.largest.amax() for affine in produced]
        bounds += [affine.weight.abs().amax() for affine in (self.out, self.ffn_out)]
        # Not "any beyond": NaN does not fit.
        within = bool((torch.stack(bounds) <= LARGEST).all())
        return within and _keeps_precision(self.ffn_in, self.ffn_out)


def _norms(weight: torch.Tensor) -> torch.Tensor:
    """Of the rows."""
    norms: torch.Tensor = torch.linalg.vector_norm(weight, dim=1)
    return norms


def _produced(affine: Affine) -> _Range:
    return _Range(affine.largest, affine.typical / math.sqrt(affine.weight.shape[1]))


def _consumed(affine: Affine) -> _Range:
    """Of the inputs' channels."""
    weight = affine.weight
    return _Range(weight.abs().amax(0), _norms(weight.T) / math.sqrt(weight.shape[0]))


def _exponents(one: _Range, other: _Range) -> torch.Tensor:
    """``e [C]``, integers: ``one`` times ``2**-e`` and ``other`` times ``2**e`` fit if any do.

    Zero where they fit as they are; else both have one root mean square, as far as range permits.
    """
    unfit = (one.typical < SMALLEST) | (other.typical < SMALLEST)
    unfit |= (one.largest > LARGEST) | (other.largest > LARGEST)
    even = (0.5 * (one.typical / other.typical).log2()).round()
    # Of a channel that is zero on one side, no share is better than another.
    wanted = torch.where(unfit & even.isfinite(), even, 0.0)
    least = (one.largest / LARGEST).log2().ceil()
    most = (LARGEST / other.largest).log2().floor()
    return torch.maximum(torch.minimum(wanted, most), least).nan_to_num(0.0, 0.0, 0.0)


def _dwarfing(affine: Affine) -> torch.Tensor:
    """Biases much larger than what they are added to, zero elsewhere."""
    bias = affine.bias
    return torch.where(bias.abs() > _DWARFS * _norms(affine.weight), bias, 0.0)


def _without(affine: Affine, part: torch.Tensor) -> Affine:
    return affine._replace(bias=affine.bias - part)


def _keeps_precision(first: Affine, second: Affine) -> bool:
    """Whether ``second(gelu(first(n)))`` is rounded about as it would be without subnormals."""
    if bool(
        (_produced(first).typical.amin() >= SMALLEST)
        & (_consumed(second).typical.amin() >= SMALLEST)
    ):
        return True
    typical = first.typical.square()
    squares = [_rounding_errors(rows).sum(2) for rows in first.weight.split(_ROWS, 0)]
    real, ideal = torch.cat(squares, 1)
    real = real + (_ROUNDING * typical).clamp_min(_SUBNORMAL)
    ideal = ideal + _ROUNDING * typical
    for rows in second.weight.split(_ROWS, 0):
        own, own_ideal = _rounding_errors(rows) @ typical
        error = rows.square() @ real + own
        allowed = _EXCESS * (rows.square() @ ideal + own_ideal)
        if not bool((error <= allowed.clamp_min(_NEGLIGIBLE**2)).all()):
            return False
    return True


def _rounding_errors(weight: torch.Tensor) -> torch.Tensor:
    """``[2, out, in]``: squared errors in float16, and in a float16 whose exponents have no end."""
    mantissa, exponent = weight.frexp()
    ideal = torch.ldexp((mantissa * 2**11).round(), exponent - 11)
    return torch.stack([weight.half().double() - weight, ideal - weight]).square()

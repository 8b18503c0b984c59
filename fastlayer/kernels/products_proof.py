"""First-use proof of ``half_gemm``'s own kernels: as ``proof``, with small operands of their own.

Each kernel runs on fresh operands and poisoned outputs, and is compared with float64.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from fastlayer.config import TransformerConfig
from fastlayer.kernels.proof import ATOL, RTOL, SHARE, compiler, kernels_digest, refusal

#: Modules of this package on which a result depends.
_SOURCES = ("primitives", "products", "rowwise", "sizes", "warm")

_SEEDS = (1, 2, 3)
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Claim:
    """The kernels of ``half_gemm`` for one shape on one device, attention's where it is our own."""

    config: TransformerConfig
    attention: bool
    device: int
    name: str
    capability: tuple[int, int]
    module: ClassVar[str] = "fastlayer.kernels.products_proof"

    def batch(self) -> int:
        """The least batch that compiles to the same kernels.

        Triton compiles a value of one and multiples of sixteen apart, the kernels whole tiles.
        """
        tokens = self.config.seq_len

        def like(batch: int) -> bool:
            pair = (batch * tokens, self.config.tokens)
            return all(len({count % size == 0 for count in pair}) == 1 for size in (16, 128)) and (
                len({count == 1 for count in pair}) == 1
            )

        return next(batch for batch in range(1, self.config.batch_size + 1) if like(batch))

    def key(self) -> str:
        """Digest of everything the outcome may depend on."""
        facts = {
            **asdict(self),
            "device": None,
            "config": {**asdict(self.config), "batch_size": self.batch()},
            "compiler": compiler(self.capability),
            "kernels": kernels_digest(_SOURCES),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Claim:
        values: dict[str, Any] = json.loads(text)
        return cls(
            config=TransformerConfig(**values.pop("config")),
            capability=tuple(values.pop("capability")),
            **values,
        )


def prove_here(claim: Claim, device: str | None = None) -> str:
    """The proof itself: the reason for a refusal, or ""."""
    import torch

    where = torch.device(device or f"cuda:{claim.device}")
    if where.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("torch finds no CUDA device in the proof's process")
        torch.cuda.set_device(where)
    checks = [_normalise, _finish, _activated, *([_attend] if claim.attention else [])]
    for check in checks:
        for seed in _SEEDS:
            torch.manual_seed(seed)
            run, expected = check(claim, where)
            reason = _differs(run, expected)
            if reason:
                name = check.__name__.removeprefix("_")
                return f"its first-use proof: {name} {reason} (seed {seed})"
    return ""


#: A kernel on operands of its own, writing to what it is given, and what it should write.
Check = tuple[Callable[[Any], object], Any]


def _activated(claim: Claim, where: Any) -> Check:
    import torch
    from torch.nn import functional as F

    from fastlayer.kernels import products

    config = claim.config
    k, n = config.d_model, config.ffn_dim
    a = torch.randn(claim.batch() * config.seq_len, k, device=where).half()
    weight = (torch.randn(n, k, device=where) * k**-0.5).half()
    bias = torch.randn(n, device=where).half()
    tile = products.tile_for(claim.capability)
    expected = F.gelu(a.double() @ weight.double().T + bias.double())
    return lambda out: products.activated(a, weight, bias, tile, out), expected


def _attend(claim: Claim, where: Any) -> Check:
    import torch

    from fastlayer.kernels import products

    config, batch = claim.config, claim.batch()
    tokens, d = config.seq_len, config.d_model
    qkv = torch.randn(batch * tokens, 3 * d, device=where).half()
    heads = qkv.double().view(batch, tokens, 3, config.num_heads, -1).permute(2, 0, 3, 1, 4)
    q, k, v = heads.unbind(0)
    scores = q @ k.transpose(-1, -2) * config.head_dim**-0.5
    if config.causal:
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=where).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    expected = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch * tokens, d)
    heads_count, causal = config.num_heads, config.causal
    return lambda out: products.attend(qkv, batch, heads_count, causal, out), expected


def _normalise(claim: Claim, where: Any) -> Check:
    import torch
    from torch.nn import functional as F

    from fastlayer.kernels import rowwise

    d = claim.config.d_model
    x = torch.randn(claim.batch() * claim.config.seq_len, d, device=where)
    shift = torch.randn(d, device=where)
    expected = F.layer_norm(x.double() + shift.double(), (d,))

    def run(out: Any) -> None:
        copy = torch.full_like(x, float("nan"))
        out.copy_(rowwise.normalise(x, shift, copy))
        if not torch.equal(copy, x):
            out.fill_(float("nan"))

    return run, expected


def _finish(claim: Claim, where: Any) -> Check:
    import torch
    from torch.nn import functional as F

    from fastlayer.kernels import rowwise

    d = claim.config.d_model
    x = torch.randn(claim.batch() * claim.config.seq_len, d, device=where)
    shift, weight, bias = torch.randn(3, d, device=where)
    expected = F.layer_norm(x.double() + shift, (d,), weight.double(), bias.double())
    return lambda out: out.copy_(rowwise.finish(x, shift, weight, bias)), expected


def _differs(run: Callable[[Any], object], expected: Any) -> str:
    """How the result, of float16 like its operands, differs from ``expected``, or ""."""
    import torch

    first = None
    for _ in range(_REPEATS):
        out = torch.full_like(expected, float("nan"), dtype=torch.float16)
        run(out)
        if first is None:
            first = out
            error = (out - expected).abs() / (RTOL * expected.abs()).clamp(min=ATOL)
            # Not "error > SHARE": a NaN, an element that nothing wrote, must count.
            wrong = int((~(error <= SHARE)).sum())
            if wrong:
                return f"differs from float64 in {wrong:,} of {error.numel():,} elements"
        elif not torch.equal(out, first):
            return "gave two results for one input"
    return ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fastlayer.kernels.products_proof")
    parser.add_argument("--claim", metavar="JSON", required=True, help="prove it in this process")
    options = parser.parse_args(arguments)
    print(json.dumps({"refusal": prove_here(Claim.from_json(options.claim))}))
    return 0


__all__ = ["Claim", "main", "prove_here", "refusal"]

if __name__ == "__main__":
    sys.exit(main())

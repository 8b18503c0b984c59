"""The proof of ``half_gemm``'s kernels: what it depends on, and that it cannot pass by default."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from fastlayer import CASES
from fastlayer.kernels import products_proof, proof
from fastlayer.kernels.products_proof import Claim
from fastlayer.kernels.proof import ProofDied

CLAIM = Claim(CASES[8], True, 0, "Some GPU", (9, 0))


@pytest.mark.parametrize(
    ("batch", "tokens", "least"),
    [(64, 128, 1), (64, 100, 32), (5, 100, 1), (12, 100, 4), (7, 1, 2), (1, 1, 1)],
)
def test_the_proof_takes_the_least_batch_of_its_class(batch: int, tokens: int, least: int) -> None:
    config = replace(CASES[8], batch_size=batch, seq_len=tokens)
    assert replace(CLAIM, config=config).batch() == least


def test_batches_that_compile_to_the_same_kernels_share_a_proof() -> None:
    other = replace(CLAIM, config=replace(CASES[8], batch_size=32), device=1)
    assert other.key() == CLAIM.key()


@pytest.mark.parametrize(
    "other",
    [
        replace(CLAIM, attention=False),
        replace(CLAIM, config=replace(CASES[8], ffn_dim=2048)),
        replace(CLAIM, config=replace(CASES[8], causal=False)),
        replace(CLAIM, name="Another GPU"),
        replace(CLAIM, capability=(12, 0)),
    ],
)
def test_everything_it_depends_on_asks_anew(other: Claim) -> None:
    assert other.key() != CLAIM.key()


def test_other_sources_ask_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = CLAIM.key()
    monkeypatch.setattr(products_proof, "kernels_digest", lambda names: "other")
    assert CLAIM.key() != before


def test_a_claim_survives_its_journey_to_the_other_process() -> None:
    assert Claim.from_json(CLAIM.as_json()) == CLAIM


def test_outcomes_are_remembered_beside_those_of_fused_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTLAYER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(proof, "_KNOWN", {})
    assert proof.refusal(CLAIM, lambda claim: "it differs") == "it differs"
    monkeypatch.setattr(proof, "_KNOWN", {})
    assert proof.refusal(CLAIM, lambda claim: "never asked") == "it differs"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine could prove it")
def test_a_proof_without_a_gpu_dies_and_says_why() -> None:
    """The real thing: a process of its own, which finds no CUDA device here."""
    with pytest.raises(ProofDied, match="RuntimeError: torch finds no CUDA"):
        proof.prove_apart(CLAIM)


#: A kernel that is off by one unit of float16's last place every other time.
ODD = itertools.cycle((0, 1))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda out, exact: None, "differs from float64 in 12 of 12"),
        (lambda out, exact: out.copy_(exact * 1.02), "differs from float64"),
        (lambda out, exact: out.copy_(exact + 1e-3 * next(ODD)), "two results for one input"),
    ],
    ids=["nothing written", "two percent", "varying"],
)
def test_what_is_wrong_is_told(wrong: object, reason: str) -> None:
    exact = torch.linspace(1.0, 2.0, 12, dtype=torch.float64)
    assert products_proof._differs(lambda out: out.copy_(exact), exact) == ""
    assert reason in products_proof._differs(lambda out: wrong(out, exact), exact)  # type: ignore[operator]

"""First-use proof: remembered by what it depends on, and never taken for granted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from fastlayer import CASES
from fastlayer.kernels import proof
from fastlayer.kernels.knobs import Launch
from fastlayer.kernels.launches import MEASURED
from fastlayer.kernels.proof import Claim, ProofDied, known_refusal, refusal

CLAIM = Claim(Launch("wavefront"), CASES[1], False, True, 0, "Some GPU", (9, 0))


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLAYER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(proof, "_KNOWN", {})


class Prover:
    def __init__(self, answer: str | Exception) -> None:
        self.answer = answer
        self.calls = 0

    def __call__(self, claim: Claim) -> str:
        self.calls += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("answer", ["", "it differs"])
def test_an_outcome_is_remembered_on_disk(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Prover(answer), Prover("never asked")
    assert refusal(CLAIM, first) == answer
    assert known_refusal(CLAIM) == answer
    monkeypatch.setattr(proof, "_KNOWN", {})  # Another process.
    assert refusal(CLAIM, second) == answer
    assert (first.calls, second.calls) == (1, 0)
    [file] = tmp_path.rglob("*.json")
    assert json.loads(file.read_text())["name"] == "Some GPU"


def test_a_death_refuses_this_process_and_is_tried_again_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert refusal(CLAIM, Prover(ProofDied("it died"))) == "it died"
    assert refusal(CLAIM, Prover("")) == "it died"
    monkeypatch.setattr(proof, "_KNOWN", {})
    assert refusal(CLAIM, Prover("")) == ""


@pytest.mark.parametrize(
    "other",
    [
        replace(CLAIM, launch=Launch("wavefront", stages=2)),
        replace(CLAIM, config=CASES[10]),
        replace(CLAIM, masked=True),
        replace(CLAIM, maximum=False),
        replace(CLAIM, name="Another GPU"),
        replace(CLAIM, capability=(12, 0)),
    ],
)
def test_everything_it_depends_on_asks_anew(other: Claim) -> None:
    refusal(CLAIM, Prover(""))
    prover = Prover("")
    refusal(other, prover)
    assert prover.calls == 1


@pytest.mark.parametrize("what", ["kernels_digest", "compiler"])
def test_other_kernels_or_compilers_ask_anew(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = CLAIM.key()
    monkeypatch.setattr(proof, what, lambda *_: "other")
    assert CLAIM.key() != before


def test_batches_that_compile_to_one_kernel_share_a_proof() -> None:
    def key(batch: int) -> str:
        return replace(CLAIM, config=replace(CASES[1], batch_size=batch)).key()

    assert key(64) == key(10_000)
    assert len({key(1), key(7), key(64)}) == 3


@pytest.mark.parametrize("tokens", [1024, 1030, 1088, 2048, 100_000, 99_999])
def test_long_sequences_are_proven_on_shorter_ones_of_their_class(tokens: int) -> None:
    claim = replace(CLAIM, config=replace(CASES[13], seq_len=tokens), launch=Launch("layers"))
    small = claim.small().seq_len
    assert small <= min(tokens, 2048)
    assert (small % 16 == 0) == (tokens % 16 == 0)
    assert (-(-small // 64) % 16 == 0) == (-(-tokens // 64) % 16 == 0)


def test_a_claim_survives_its_journey_to_the_other_process() -> None:
    assert Claim.from_json(CLAIM.as_json()) == CLAIM


def test_a_proof_without_a_gpu_dies_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing: a process of its own, which finds no CUDA device here."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine could prove it")
    with pytest.raises(
        ProofDied, match="its first-use proof died: RuntimeError: torch finds no CUDA"
    ):
        proof.prove_apart(CLAIM)


def test_an_unreadable_record_is_proven_again(tmp_path: Path) -> None:
    path = tmp_path / "proofs" / f"{CLAIM.key()}.json"
    path.parent.mkdir()
    path.write_text("{")
    prover = Prover("")
    assert refusal(CLAIM, prover) == ""
    assert prover.calls == 1
    assert json.loads(path.read_text())["refusal"] == ""


def test_the_claims_of_a_device_are_those_of_its_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Facts:
        name, major, minor, multi_processor_count = "NVIDIA H200", 9, 0, 132

    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: Facts)
    assert proof.main(["--list"]) == 0
    claims = [Claim.from_json(line) for line in capsys.readouterr().out.splitlines()]
    listed = [row.launch for rows in MEASURED[9, 0].values() for row in rows]
    assert [claim.launch for claim in claims] == listed
    unbounded = {claim.config for claim in claims if claim.maximum}
    assert unbounded == {CASES[13]}

"""First-use proof: a kernel runs a small known input before a device and compiler are trusted.

Compilers have turned correct kernels into wrong ones in silence, or into ones that fault (Triton
issues 10486, 10573 and 11366). So the first time a launch meets a device, a Triton, a ptxas and a
state of this package's kernels, a process of its own compiles it, runs it on fresh inputs with
poisoned outputs and compares it with the reference in float64. A fault or a hang there costs that
process and no other. What passed or differed is remembered on disk; what died is tried again by
the next process.

    python -m fastlayer.kernels.proof --all     # proves every listed launch of this device
    python -m fastlayer.kernels.proof --list    # one claim a line, for --claim under a sanitizer

The directory is ``$FASTLAYER_CACHE_DIR``, or ``fastlayer`` under ``$XDG_CACHE_HOME`` or ~/.cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

from fastlayer.config import TransformerConfig
from fastlayer.kernels.knobs import Launch, sizes_for

#: The project's tolerance; a proof allows this share of it, because float64 is no TF32 reference.
ATOL, RTOL, SHARE = 0.002, 0.02, 0.75

#: Seconds after which a proof counts as hung; compilation takes up to half a minute.
TIMEOUT_S = 180

#: Modules of this package on which a fused result depends.
_SOURCES = (
    "half_range",
    "knobs",
    "launch",
    "packing",
    "primitives",
    "single",
    "sizes",
    "strips",
    "wavefront",
)

_SEEDS = (1, 2, 3)

#: Tokens up to which a proof takes the very length; dense float64 scores of it fit any GPU.
_LONG = 1024
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Claim:
    """What is proven: one kernel of one launch for one shape on one device.

    ``masked`` and ``maximum`` tell its kernels apart: with a length for each sample or without,
    with the softmax's maximum subtracted or not.
    """

    launch: Launch
    config: TransformerConfig
    masked: bool
    maximum: bool
    device: int
    name: str
    capability: tuple[int, int]
    module: ClassVar[str] = "fastlayer.kernels.proof"

    def small(self) -> TransformerConfig:
        """A small shape that compiles to the same kernel.

        Triton compiles a value of one and multiples of sixteen apart, so batch, tokens and tiles
        stay in their class; beyond ``_LONG`` tokens a length is like any other.
        """
        batch, tokens, rows = self.config.batch_size, self.config.seq_len, self.launch.rows

        def like(length: int) -> bool:
            return all(
                (now % 16 == 0) == (then % 16 == 0)
                for now, then in ((length, tokens), (-(-length // rows), -(-tokens // rows)))
            )

        if tokens > _LONG:
            tokens = next(length for length in range(_LONG, tokens + 1) if like(length))
        small = 1 if batch == 1 else 3 if batch % 16 else 16
        return replace(self.config, batch_size=small, seq_len=tokens)

    def key(self) -> str:
        """Digest of everything the outcome may depend on."""
        facts = {
            "launch": asdict(self.launch),
            "config": asdict(self.small()),
            "masked": self.masked,
            "maximum": self.maximum,
            "name": self.name,
            "capability": self.capability,
            "compiler": compiler(self.capability),
            "kernels": kernels_digest(),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Claim:
        values: dict[str, Any] = json.loads(text)
        return cls(
            launch=Launch(**values.pop("launch")),
            config=TransformerConfig(**values.pop("config")),
            capability=tuple(values.pop("capability")),
            **values,
        )


@cache
def kernels_digest(names: tuple[str, ...] = _SOURCES) -> str:
    """Digest of the sources that kernels are made of, by default those of a fused launch."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode() + b"\0")
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def compiler(capability: tuple[int, int]) -> str:
    """Versions of what compiles the kernels."""
    import triton

    from fastlayer.kernels.compile import ptxas_version

    return f"triton {triton.__version__}, {ptxas_version(10 * capability[0] + capability[1])}"


def cache_directory() -> Path:
    named = os.environ.get("FASTLAYER_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastlayer"


class Provable(Hashable, Protocol):
    """A claim, hashable by value. ``module --claim JSON`` proves it in a process of its own."""

    @property
    def module(self) -> str: ...

    @property
    def capability(self) -> tuple[int, int]: ...

    def key(self) -> str: ...

    def as_json(self) -> str: ...


_KNOWN: dict[Provable, str] = {}


def refusal(claim: Provable, prove: Callable[[Any], str] | None = None) -> str:
    """Why ``claim`` may not be relied upon, or "" where it is proven, now or before.

    ``prove`` runs the proof and returns the reason for a refusal; it raises ``ProofDied`` where the
    proof could not come to an end.
    """
    if claim not in _KNOWN:
        _KNOWN[claim] = _look_up(claim, prove or prove_apart)
    return _KNOWN[claim]


def known_refusal(claim: Provable) -> str:
    """The refusal that this process has met, or ""; proves nothing and reads no file."""
    return _KNOWN.get(claim, "")


class ProofDied(RuntimeError):
    """The proof's process ended without an answer."""


def _look_up(claim: Provable, prove: Callable[[Any], str]) -> str:
    path = cache_directory() / "proofs" / f"{claim.key()}.json"
    try:
        return str(json.loads(path.read_text())["refusal"])
    except (OSError, ValueError, KeyError):
        pass  # Not proven yet, or not readable: prove it again.
    try:
        reason = prove(claim)
    except ProofDied as death:
        return str(death)
    facts = {"refusal": reason, "compiler": compiler(claim.capability)}
    _remember(path, {**facts, **json.loads(claim.as_json())})
    return reason


def _remember(path: Path, outcome: dict[str, object]) -> None:
    """By temporary file and rename; a directory that cannot be written costs a proof next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(outcome, file, indent=1, sort_keys=True)
        os.replace(file.name, path)
    except OSError:
        return


def prove_apart(claim: Provable) -> str:
    """Runs the proof in a process of its own; the reason for a refusal, or "".

    Raises:
        ProofDied: it faulted, hung, or could not start.
    """
    command = [sys.executable, "-m", claim.module, "--claim", claim.as_json()]
    # The same fastlayer as here, however this process found it.
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": paths}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ProofDied(f"its first-use proof did not end within {TIMEOUT_S} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ProofDied(f"its first-use proof died: {lines[-1] if lines else done.returncode}")
    return str(json.loads(done.stdout.splitlines()[-1])["refusal"])


def prove_here(claim: Claim, device: str | None = None) -> str:
    """The proof itself: the reason for a refusal, or ""."""
    import torch

    from fastlayer.kernels.launch import program
    from fastlayer.kernels.packing import pack
    from fastlayer.reference import ReferenceTransformer

    where = torch.device(device or f"cuda:{claim.device}")
    if where.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("torch finds no CUDA device in the proof's process")
        torch.cuda.set_device(where)
    config = claim.small()
    torch.manual_seed(1234)
    model = ReferenceTransformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    weights = pack(model.to(where).state_dict(), sizes_for(claim.launch, config))
    model = model.double()
    # The canonical model's scores are small, so the kernel without a maximum may run on it.
    bounds = (float("inf") if claim.maximum else 0.0,)
    run = program(
        claim.launch,
        config,
        replace(weights, score_bounds=bounds),
        masked=claim.masked,
        device=where,
    )
    reasons = (_differs(run, model, config, claim.masked, seed, where) for seed in _SEEDS)
    return next(filter(None, reasons), "")


def _differs(
    run: Any, model: Any, config: TransformerConfig, masked: bool, seed: int, where: Any
) -> str:
    """How one input's result differs from the reference, or ""."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    shape = (config.batch_size, config.seq_len, config.d_model)
    x = torch.randn(shape, generator=generator).to(where)
    lengths = mask = None
    if masked:
        counts = torch.randint(0, config.seq_len + 1, shape[:1], generator=generator)
        counts[0] = config.seq_len
        lengths = counts.to(where, torch.int32)
        mask = torch.arange(config.seq_len, device=where)[None] < lengths[:, None]
        x = x * mask[:, :, None]
    with torch.no_grad():
        expected = model(x.double(), mask)
    first = None
    for _ in range(_REPEATS):
        out = torch.full_like(x, float("nan"))
        run(x, out, lengths)
        if first is None:
            first = out
            error = (out - expected).abs() / (RTOL * expected.abs()).clamp(min=ATOL)
            # Not "error > SHARE": a NaN, an element that nothing wrote, must count.
            wrong = int((~(error <= SHARE)).sum())
            if wrong:
                return (
                    f"its first-use proof differs from the reference in {wrong:,} of "
                    f"{error.numel():,} elements (seed {seed})"
                )
        elif not torch.equal(out, first):
            return f"its first-use proof gave two results for one input (seed {seed})"
    return ""


def claims_of_this_device(masked: bool = False) -> list[Claim]:
    """One claim for each disclosed case and listed launch on the current CUDA device.

    The weights are torch's default initialisation, which says whether softmax needs its maximum.
    """
    import torch

    from fastlayer.cases import CASES
    from fastlayer.kernels.launches import candidates
    from fastlayer.kernels.packing import pack
    from fastlayer.reference import ReferenceTransformer

    index = torch.cuda.current_device()
    facts = torch.cuda.get_device_properties(index)
    capability = (facts.major, facts.minor)
    claims = []
    for config in CASES.values():
        launches = candidates(config, capability, facts.multi_processor_count)
        if not launches:
            continue
        torch.manual_seed(1234)
        state = ReferenceTransformer(config).state_dict()
        for launch in launches:
            bounds = pack(state, sizes_for(launch, config)).score_bounds
            maximum = launch.keeps_maximum(bounds, sizes_for(launch, config))
            claims.append(Claim(launch, config, masked, maximum, index, facts.name, capability))
    return claims


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fastlayer.kernels.proof")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--claim", metavar="JSON", help="prove one claim in this process")
    group.add_argument("--all", action="store_true", help="every listed launch of this device")
    group.add_argument("--list", action="store_true", help="print those claims as JSON lines")
    parser.add_argument(
        "--masked", action="store_true", help="with --all and --list: for padded batches"
    )
    options = parser.parse_args(arguments)
    if options.claim:
        print(json.dumps({"refusal": prove_here(Claim.from_json(options.claim))}))
        return 0
    claims = claims_of_this_device(options.masked)
    if options.list:
        print("\n".join(claim.as_json() for claim in claims))
        return 0
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 2)) as pool:
        reasons = list(pool.map(refusal, claims))
    for claim, reason in zip(claims, reasons, strict=True):
        print(f"{claim.config.label()}: {claim.launch.as_dict()}: {reason or 'proven'}")
    return 1 if any(reasons) else 0


if __name__ == "__main__":
    sys.exit(main())

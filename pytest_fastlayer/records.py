"""The JSON that a run writes and a baseline stores: its schema, as pydantic models.

One schema serves both: a baseline is a run record that was accepted. Units are SI in the field's
name (``_s``, ``_mib`` for memory); numbers are finite (a NaN or an infinity is refused with the
path of the entry); unknown fields are refused, so that a typing error cannot pass as a setting.

What decides whether two cases may be compared (``identity``) is kept apart from telemetry: driver
and library versions explain a change, they do not forbid the comparison.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

SCHEMA_VERSION = 1

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
#: Integers of a record fit 64 bits, as torch's seeds do; larger ones overflow against a float.
Integer = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
Count = Annotated[Integer, Field(ge=0, le=2**63 - 1)]
AtLeastOne = Annotated[Count, Field(ge=1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _writable(facts: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Free-form values keep the rule of all others: what JSON cannot hold is refused."""
    try:
        json.dumps(facts, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected what JSON can hold, with finite numbers: {error}") from None
    return facts


#: Free-form facts, such as a workload or a launch.
Facts = Annotated[dict[str, JsonValue], AfterValidator(_writable)]
#: What a case's reference is: only ratios over the first and the last are speedups.
ReferenceKind = Literal["dense", "oracle", "other"]


class Verdict(StrEnum):
    """What the gate says of one case."""

    PASS = "PASS"  #: accurate, and the speedup's interval clears 1 + floor; no regression
    FASTER = "FASTER"  #: PASS, and faster than the baseline beyond the combined floors
    BELOW_FLOOR = "BELOW_FLOOR"  #: accurate, but the speedup does not clear 1 + floor
    SLOWER = "SLOWER"  #: slower than the baseline beyond the combined floors
    MORE_MEMORY = "MORE_MEMORY"  #: candidate's peak memory above the baseline's tolerance
    INCORRECT = "INCORRECT"  #: at least one element out of tolerance, or not finite
    DISHONEST = "DISHONEST"  #: a probe caught the candidate (or harness) cheating
    INCONCLUSIVE = "INCONCLUSIVE"  #: the interval straddles the floor after every extension
    UNRESOLVABLE = "UNRESOLVABLE"  #: the timer cannot resolve the work
    NO_BASELINE = "NO_BASELINE"  #: green on its own; nothing stored to compare with
    STALE_BASELINE = "STALE_BASELINE"  #: stored for another reference, workload or method
    OTHER_MACHINE = "OTHER_MACHINE"  #: green on its own; stored figures are another device's
    UNSUPPORTED = "UNSUPPORTED"  #: this machine cannot hold or finish the case; says why
    ACCURATE = "ACCURATE"  #: accuracy and honesty checked, not timed
    UNJUDGED = "UNJUDGED"  #: measured in part or whole, and then something raised; says what


#: Verdicts that let a run pass without a word.
GREEN = frozenset({Verdict.PASS, Verdict.FASTER, Verdict.ACCURATE, Verdict.UNSUPPORTED})
#: Green with a notice, red under ``--fastlayer-require-baseline``.
NOTICE = frozenset({Verdict.NO_BASELINE, Verdict.OTHER_MACHINE})


class Model(BaseModel):
    """Frozen, closed, finite: the rules that every record keeps."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=False)


class Device(Model):
    """Identity of the device that was measured. Every field decides comparability."""

    type: Literal["cuda", "cpu"]
    name: str
    capability: tuple[Count, Count] | None = None  #: CUDA compute capability; None on CPU
    multiprocessors: Count  #: streaming multiprocessors, or the threads torch uses on CPU
    memory_mib: Count

    @property
    def slug(self) -> str:
        """File-name form of the name: ``NVIDIA H200`` -> ``nvidia-h200``."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or self.type

    def matches(self, other: Device) -> bool:
        """Same device for the purpose of comparing ratios.

        Memory may differ by 2%: drivers reserve different amounts on the same card.
        """
        same = (self.type, self.name, self.capability, self.multiprocessors) == (
            other.type,
            other.name,
            other.capability,
            other.multiprocessors,
        )
        largest = max(self.memory_mib, other.memory_mib)
        return same and abs(self.memory_mib - other.memory_mib) <= 0.02 * largest


class Software(Model):
    """Telemetry: shown as "changed since", never a reason to refuse a comparison."""

    python: str
    platform: str
    pytest_fastlayer: str | None = None
    torch: str | None = None
    triton: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    driver: str | None = None


class Precision(Model):
    """Global float32 settings in force while a case was measured. Part of its identity."""

    float32_matmul_precision: Literal["highest", "high", "medium"]
    allow_tf32: bool  #: torch.backends.cuda.matmul.allow_tf32


class ToleranceRecord(Model):
    """``either``: |c-r| <= atol OR |c-r| <= rtol*|r|. ``sum``: |c-r| <= atol + rtol*|r|."""

    atol: NonNegative
    rtol: NonNegative
    mode: Literal["either", "sum"] = "either"


class RootMeanSquare(Model):
    """Root-mean-square error against a float64 evaluation of the reference."""

    candidate: NonNegative
    reference: NonNegative


class Accuracy(Model):
    """Per-element comparison over all trials of a case.

    ``budget_used`` is the worst finite element's share of its tolerance; ``None`` for ``max_abs``
    and ``budget_used`` means that no finite pair existed.
    """

    trials: Count
    seeds: tuple[Integer, ...]
    failed: Count
    nonfinite: Count  #: candidate elements that are NaN or inf where the reference is not the same
    total: Count
    max_abs: NonNegative | None = None
    budget_used: NonNegative | None = None
    tolerance: ToleranceRecord
    rms_vs_float64: RootMeanSquare | None = None

    @property
    def passed(self) -> bool:
        return self.failed == 0 and self.total > 0


class Method(Model):
    """How a case was timed. Two timings are comparable only when ``clock`` and ``l2`` agree."""

    clock: Literal["cuda_events", "cpu_clock", "published"]
    l2: Literal["warm", "cold"] = "warm"
    settle_s: NonNegative
    #: What ``settle_s`` counts: both arms together, in alternation, or each arm by itself.
    settling: Literal["alternating", "each_arm"] = "each_arm"
    block_ms: Positive


class NoiseFloor(Model):
    """The four sources of the noise floor, as fractions; the floor is the largest."""

    within_quad: NonNegative
    control: NonNegative
    resolution: NonNegative
    min_effect: NonNegative

    @property
    def value(self) -> float:
        return max(self.within_quad, self.control, self.resolution, self.min_effect)


class Control(Model):
    """The A/A control: one arm timed against itself by the same schedule."""

    arm: Literal["reference", "candidate"]
    speedup: Positive
    ci: tuple[Positive, Positive] | None = None
    pairs: Count | None = None


class ForwardsPerBlock(Model):
    """Forwards in one timed block of each arm."""

    reference: AtLeastOne
    candidate: AtLeastOne


class Clocks(Model):
    """What NVML said around the blocks: telemetry, and the reason why pairs were dropped."""

    sm_mhz_min: Count
    sm_mhz_max: Count
    throttle_reasons: tuple[str, ...] = ()
    other_processes: Count = 0


class Timing(Model):
    """A speedup (reference time over candidate time) with everything needed to judge it.

    ``ci`` is the bootstrap interval of the speedup; ``noise_floor`` a fraction (0.01 = 1%).
    ``log_ratios`` keeps the per-pair trace, natural logarithms in measured order; a baseline may
    leave it out.
    """

    method: Method
    reference_s: Positive
    candidate_s: Positive
    speedup: Positive
    ci: tuple[Positive, Positive] | None = None
    noise_floor: NonNegative
    floor_sources: NoiseFloor | None = None
    aa: Control | None = None
    min_detectable_effect: NonNegative | None = None
    pairs: Count
    dropped_pairs: Count = 0
    dropped_reasons: tuple[str, ...] = ()
    extensions: Count = 0
    forwards_per_block: ForwardsPerBlock | None = None
    clocks: Clocks | None = None
    log_ratios: tuple[float, ...] | None = None
    warnings: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _ordered(self) -> Timing:
        if self.ci is not None and not self.ci[0] <= self.ci[1]:
            raise ValueError(f"ci must be (low, high), got {self.ci}")
        if self.floor_sources is not None and self.noise_floor < self.floor_sources.value:
            raise ValueError("noise_floor is below one of its own sources")
        return self


class PeakMemory(Model):
    """Peak memory of each arm above its starting level, MiB; None where it cannot be read."""

    reference: NonNegative | None = None
    candidate: NonNegative | None = None


class Probe(Model):
    """One honesty probe: whether it passed, and what the candidate did if it did not."""

    name: str
    passed: bool
    message: str = ""


class Arm(Model):
    """A further arm measured against the same reference in the same run.

    A *rival* is what a user would pick instead; a *variant* is another way the candidate itself
    could run. Refused arms stay, with the reason: a negative result is a result.
    """

    name: str
    verdict: Verdict
    reason: str = ""
    launch: Facts | None = None
    accuracy: Accuracy | None = None
    timing: Timing | None = None
    peak_mib: NonNegative | None = None

    @model_validator(mode="after")
    def _no_speed_without_a_pass(self) -> Arm:
        _refuse_unearned_speed(self.verdict, self.accuracy, self.timing)
        return self


def _refuse_unearned_speed(
    verdict: Verdict, accuracy: Accuracy | None, timing: Timing | None
) -> None:
    if timing is None:
        return
    if verdict in (Verdict.INCORRECT, Verdict.DISHONEST):
        raise ValueError(f"a {verdict} case cannot carry a timing")
    if accuracy is None or not accuracy.passed:
        raise ValueError("a timing needs an accuracy with no failed element")


class Work(Model):
    """What one forward must do at the least, whoever computes it: a roofline's two coordinates.

    Both are of the *minimal* algorithm, so that no candidate is credited for work it need not do:
    ``flops`` the floating-point operations that the result requires, ``bytes`` what must cross
    the memory bus once (inputs, parameters, output).
    """

    flops: Positive
    bytes: Positive


class Comparison(Model):
    """The candidate's speedup now over the stored one: below 1 is slower."""

    baseline: str  #: file the stored figure came from
    provenance: Literal["measured", "published"]
    ratio: Positive
    ci: tuple[Positive, Positive] | None = None
    threshold: NonNegative  #: combined noise floors, as a fraction
    p_value: Annotated[float, Field(ge=0, le=1)]  #: one-sided, that the drop lies within threshold
    changed_since: tuple[str, ...] = ()


class Ratio(Model):
    """The time of one arm over the time of another, with its interval."""

    value: Positive
    ci: tuple[Positive, Positive] | None = None


#: What became of the base of a run. Only ``measured`` carries a timing.
BaseStatus = Literal[
    "measured",
    "incorrect",  # out of tolerance against this tree's reference
    "missing",  # the revision lacks the test, or the test makes no pair of this name
    "import_error",  # its test module, or what that imports, does not import
    "failed",  # its test or candidate raised, or its package was not the revision's own
    "crashed",  # its process ended
    "timeout",  # its process did not answer
    "unsupported",  # it says that this machine cannot hold the case
    "different",  # it is fed other inputs: another workload under the same name
    "unresolvable",  # the samples give no ratio
]


class BaseArm(Model):
    """The candidate of another revision, timed in the same schedule as reference and candidate.

    ``timing`` is the candidate of this tree (the head) against that of the base: its
    ``reference_s`` is the base's time and its ``candidate_s`` the head's, each measured in a
    process of its own, so ``speedup`` is base time over head time and **below 1 the head is
    slower**. Its ``aa`` is the head against itself in two processes. ``head`` and ``base`` are the
    speedups of both over the reference in that schedule, which leaves a reference out that takes
    too long for it.

    ``verdict`` is the head's against the base, for a measured base: SLOWER, FASTER, PASS (no drop
    beyond the floor) or INCONCLUSIVE; INCORRECT, UNSUPPORTED and UNRESOLVABLE are the base's own.
    ``tail`` holds the last lines that the base's process wrote where something went wrong.
    """

    rev: str  #: as it was given: a revision, or the path of a checkout
    commit: str | None = None  #: its full hash; None for a folder that is no repository
    status: BaseStatus
    reason: str = ""
    verdict: Verdict | None = None
    route: str | None = None
    launch: Facts | None = None
    accuracy: Accuracy | None = None  #: of the base against this tree's reference
    timing: Timing | None = None
    reference_s: Positive | None = None
    head: Ratio | None = None
    base: Ratio | None = None
    p_value: Annotated[float, Field(ge=0, le=1)] | None = None  #: one-sided, all looks allowed for
    process_ratios: tuple[Positive, ...] = ()  #: the ratio in each set of fresh processes
    process_controls: tuple[Positive, ...] = ()  #: the head against itself in each set
    tail: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _no_speed_without_a_pass(self) -> BaseArm:
        beside = {figure is not None for figure in (self.reference_s, self.head, self.base)}
        figures = {figure is not None for figure in (self.timing, self.p_value)}
        if self.status == "measured" and (False in figures or len(beside) > 1):
            raise ValueError("a measured base has timing and p_value, and all of the reference")
        if self.status != "measured" and True in figures | beside:
            raise ValueError(f"a base that is {self.status} cannot carry a figure")
        if (self.status == "incorrect") != (self.verdict is Verdict.INCORRECT):
            raise ValueError("a base is incorrect in status and verdict, or in neither")
        if self.timing is not None and self.verdict not in BASE_VERDICTS:
            raise ValueError(
                f"a measured base is judged {', '.join(sorted(BASE_VERDICTS))}, not {self.verdict}"
            )
        _refuse_unearned_speed(self.verdict or Verdict.PASS, self.accuracy, self.timing)
        return self


#: Verdicts of a head against a base that was measured.
BASE_VERDICTS = frozenset({Verdict.SLOWER, Verdict.FASTER, Verdict.PASS, Verdict.INCONCLUSIVE})


class StressCell(Model):
    """One cell of a stress grid: a kind of input, over all seeds."""

    label: str
    workload: Facts = Field(default_factory=dict)
    gated: bool = True
    elements: Count
    failed: Count
    budget_used: NonNegative | None = None  #: the worst finite element's share of its tolerance
    seed: Integer | None = None  #: of the worst element, a failing one before any other
    route: str | None = None  #: what ran


class Stress(Model):
    """Accuracy over a grid of inputs. The totals are of the gated cells alone."""

    seeds: tuple[Integer, ...]
    note: str = ""
    elements: Count
    failed: Count
    budget_used: NonNegative | None = None
    cell: str | None = None  #: label of the worst gated cell
    seed: Integer | None = None  #: and its worst seed
    cells: tuple[StressCell, ...]
    ungated: tuple[StressCell, ...] = ()

    @classmethod
    def of(cls, cells: Sequence[StressCell], seeds: Sequence[int], note: str = "") -> Stress:
        """The totals of these cells."""
        gated = tuple(cell for cell in cells if cell.gated)
        worst = max(gated, key=lambda cell: (cell.failed > 0, cell.budget_used or 0), default=None)
        used = [cell.budget_used for cell in gated if cell.budget_used is not None]
        return cls(
            seeds=tuple(seeds),
            note=note,
            elements=sum(cell.elements for cell in gated),
            failed=sum(cell.failed for cell in gated),
            budget_used=max(used, default=None),
            cell=None if worst is None else worst.label,
            seed=None if worst is None else worst.seed,
            cells=gated,
            ungated=tuple(cell for cell in cells if not cell.gated),
        )

    @model_validator(mode="after")
    def _adds_up(self) -> Stress:
        if self.failed != sum(cell.failed for cell in self.cells):
            raise ValueError("failed is not the sum over the gated cells")
        return self


class Origin(Model):
    """The run that a stored case was measured in; fields as in ``RunRecord``."""

    created: str
    commit: str | None = None
    software: Software | None = None  #: None where a version that did not keep it wrote the file


class CaseRecord(Model):
    """One case of one run. A timing cannot be constructed for a case that is not accurate."""

    verdict: Verdict
    reason: str = ""
    label: str = ""
    workload: Facts = Field(default_factory=dict)
    work: Work | None = None
    reference_sha256: Sha256 | None = None
    reference_kind: ReferenceKind = "other"
    precision: Precision | None = None
    route: str | None = None
    launch: Facts | None = None
    objections: dict[str, list[str]] | None = None  #: rejected route -> reasons
    notes: tuple[str, ...] = ()  #: what the candidate says of its run, e.g. what a guard measured
    accuracy: Accuracy | None = None
    stress: Stress | None = None
    timing: Timing | None = None
    peak_mib: PeakMemory | None = None
    probes: tuple[Probe, ...] = ()
    rivals: tuple[Arm, ...] = ()
    variants: tuple[Arm, ...] = ()
    comparison: Comparison | None = None
    base: BaseArm | None = None
    nodeid: str | None = None
    kept_from: Origin | None = None  #: in a baseline: of an earlier run than the file's last

    @property
    def is_below_stored(self) -> bool:
        """Held against its base, where the stored baseline alone would have called it slower."""
        change = self.comparison
        if self.base is None or self.base.timing is None or change is None or change.ci is None:
            return False
        return change.ci[1] < 1 / (1 + change.threshold)

    @property
    def is_diagnostic(self) -> bool:
        """The ratio is over an oracle, built to be lean and not fast: it claims no speedup."""
        return self.reference_kind == "oracle"

    @model_validator(mode="after")
    def _no_speed_without_a_pass(self) -> CaseRecord:
        _refuse_unearned_speed(self.verdict, self.accuracy, self.timing)
        if self.timing is not None and self.stress is not None and self.stress.failed:
            raise ValueError("a timing needs a stress grid with no failed element")
        return self


class Settings(Model):
    """The settings of the run as a whole; a case's own ``method`` is what it really used."""

    pairs: Count
    settle_s: NonNegative
    block_ms: Positive
    l2: Literal["warm", "cold"] = "warm"
    min_effect: NonNegative
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.05


class RunRecord(Model):
    """A run, and equally a baseline file."""

    schema_version: Literal[1] = 1
    provenance: Literal["measured", "published"] = "measured"
    created: str  #: ISO 8601, UTC
    commit: str | None = None  #: git revision, "-dirty" appended when the tree had changes
    device: Device
    software: Software
    settings: Settings | None = None
    notes: tuple[str, ...] = ()
    cases: dict[str, CaseRecord] = Field(default_factory=dict)

    @field_validator("cases")
    @classmethod
    def _natural_order(cls, cases: dict[str, CaseRecord]) -> dict[str, CaseRecord]:
        """Case 2 before case 10, whatever order the tests ran or the file was sorted in."""
        return dict(sorted(cases.items(), key=lambda item: natural_key(item[0])))

    def to_json(self) -> str:
        """Stable text: sorted keys, two-space indent, a newline at the end, no NaN.

        Nothing in it is a command to a CI runner, which may see it printed.
        """
        data = self.model_dump(mode="json", exclude_none=True, exclude_defaults=False)
        text = json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n"
        # The same JSON: "##[" can only be inside a string. No line of it starts with a colon.
        return text.replace("##[", r"##\u005b")


def natural_key(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key under which the numbers inside names count as numbers."""
    parts = re.split(r"([0-9]+)", name)
    return tuple((0, int(part)) if i % 2 else (1, part) for i, part in enumerate(parts))


def json_schema() -> dict[str, Any]:
    """JSON schema of a run record or baseline file."""
    return RunRecord.model_json_schema()

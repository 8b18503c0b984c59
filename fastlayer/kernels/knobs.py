"""The knobs of a fused launch, as a frozen value. Imports neither torch nor triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fastlayer.kernels.sizes import FusedSizes, power_of_two

Form = Literal["single", "wavefront", "layers", "strips"]

#: Scores below this power of two, and above its inverse, keep float16 probabilities within a bit of
#: the normal range (2**-14 to 2**16), so a softmax may leave out its maximum.
SAFE_SCORE_BOUND = 15.0


@dataclass(frozen=True, slots=True)
class Launch:
    """Which kernel form, and how it is cut and compiled.

    Attributes:
        form: "single" (whole sequences a program), "wavefront" (row tiles a program, one launch),
            "layers" (row tiles, one launch a layer) or "strips" (sixteen rows a program).
        rows: rows of a program's tile.
        keys: keys of one attention block (wavefront, layers).
        qkv_chunk, chunk: columns of Q, K, V, and of the hidden layer, computed at once.
        passes: how many times strips go through attention, each with its share of the heads.
        early: strips ask for weights a stage before their use, at the price of registers.
        by_tile: a wavefront's programs are ordered by tile before sequence.
        apart: layers project Q, K and V in a launch of its own.
        warps, stages, max_registers: compiler options.
        exact_gelu: GELU by erf rather than by the fit.
    """

    form: Form
    rows: int = 64
    keys: int = 128
    qkv_chunk: int = 128
    chunk: int = 64
    passes: int = 1
    early: bool = True
    by_tile: bool = False
    apart: bool = False
    warps: int = 4
    stages: int = 3
    max_registers: int = 0
    exact_gelu: bool = False

    def tiles(self, sizes: FusedSizes) -> int:
        """Tiles of one sequence."""
        return 1 if self.form == "single" else -(-sizes.tokens // self.rows)

    @property
    def options(self) -> dict[str, Any]:
        """Triton's compile options."""
        options: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages}
        if self.max_registers:
            options["maxnreg"] = self.max_registers
        return options

    def keeps_maximum(self, score_bounds: Sequence[float]) -> bool:
        """Whether softmax must subtract its maximum: unless every layer's bound is safe."""
        return max(score_bounds) > SAFE_SCORE_BOUND

    def objections(self, sizes: FusedSizes) -> list[str]:
        """Why this launch cannot compute such a model; empty where it can."""
        reasons = []
        if self.form == "single" and power_of_two(sizes.tokens) > self.rows:
            reasons.append(f"{sizes.tokens} tokens do not fit a tile of {self.rows} rows")
        if self.form in ("wavefront", "strips") and not sizes.causal:
            reasons.append("a tile would wait on later tiles: not causal")
        if self.form == "strips":
            if sizes.heads_per_group > 1:
                reasons.append("strips take sizes whose narrowest head is sixteen columns")
            if min(sizes.width, sizes.hidden, sizes.heads_width) < 32:
                reasons.append("strips take widths of at least 32 columns")
            if sizes.hidden & (sizes.hidden - 1):
                reasons.append(f"the hidden width {sizes.hidden} is no power of two")
            heads, odd = divmod(power_of_two(sizes.num_heads), self.passes)
            if odd or heads * self.rows // 16 < self.warps:
                reasons.append(
                    f"{sizes.num_heads} heads in {self.passes} passes over {self.rows} rows leave "
                    f"fewer than {self.warps} items, one for each warp"
                )
        return reasons

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

"""The knobs of a fused launch, as a frozen value. Imports neither torch nor triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from fastlayer.config import TransformerConfig
from fastlayer.kernels.sizes import FusedSizes, power_of_two

Form = Literal["single", "wavefront", "layers", "strips"]

#: Widest model whose residual tile stays in registers.
WIDEST = 128

#: Keys that a strip's attention takes at once, for all of its heads.
LONGEST_STRIPS = 128

#: Scores below this power of two, and above its inverse, keep float16 weights within a bit of the
#: normal range (2**-14 to 2**16), so a softmax may leave out its maximum.
SAFE_SCORE_BOUND = 15.0

#: The same where weights are divided by their sum before they are rounded: a thousand of them, and
#: the inverse of their sum, stay within float32's normal range (2**-126 to 2**128).
SAFE_SCORE_BOUND_AT_ONCE = 100.0


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
        flat: a wavefront's one loop runs over the key blocks of all heads, not one a head.
        by_tile: a wavefront's programs are ordered by tile before sequence.
        apart: layers project Q, K and V in a launch of its own.
        warps, stages, max_registers: compiler options.
        attention_stages: stages of the loop over heads and keys; as ``stages`` where zero.
        exact_gelu: GELU by erf rather than by the fit.
    """

    form: Form
    rows: int = 64
    keys: int = 128
    qkv_chunk: int = 128
    chunk: int = 64
    passes: int = 1
    early: bool = True
    flat: bool = False
    by_tile: bool = False
    apart: bool = False
    warps: int = 4
    stages: int = 3
    attention_stages: int = 0
    max_registers: int = 0
    exact_gelu: bool = False

    def tiles(self, sizes: FusedSizes) -> int:
        """Tiles of one sequence."""
        return 1 if self.form == "single" else -(-sizes.tokens // self.rows)

    def programs(self, sizes: FusedSizes) -> int:
        """Programs of one kernel launch."""
        if self.form == "single":
            return -(-sizes.batch // max(1, self.rows // power_of_two(sizes.tokens)))
        return sizes.batch * self.tiles(sizes)

    def workspace_elements(self, sizes: FusedSizes) -> tuple[int, int]:
        """Elements of what tiles exchange: float16 keys and values, int32 flags."""
        tiles = self.tiles(sizes)
        copies, columns = {
            "single": (0, 0),
            "wavefront": (sizes.num_layers, 3 * sizes.heads_width),
            "layers": (2, 3 * sizes.heads_width),
            "strips": (sizes.num_layers, 2 * sizes.heads_width),
        }[self.form]
        # Blocks of keys may reach past the last tile.
        rows = sizes.batch * tiles * self.rows + self.keys
        return max(1, copies * rows * columns), sizes.batch * power_of_two(tiles)

    def workspace_bytes(self, sizes: FusedSizes) -> int:
        keys, flags = self.workspace_elements(sizes)
        return 2 * keys + 4 * flags

    @property
    def options(self) -> dict[str, Any]:
        """Triton's compile options."""
        options: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages}
        if self.max_registers:
            options["maxnreg"] = self.max_registers
        return options

    def takes_keys_at_once(self, sizes: FusedSizes) -> bool:
        """Whether a row meets all its keys in one block, so that its softmax is a whole one."""
        blocked = self.tiles(sizes) * self.rows > self.keys
        return self.form in ("single", "strips") or (self.form == "wavefront" and not blocked)

    def keeps_maximum(self, score_bounds: Sequence[float], sizes: FusedSizes) -> bool:
        """Whether softmax must subtract its maximum: unless every layer's bound is safe."""
        at_once = self.takes_keys_at_once(sizes)
        safe = SAFE_SCORE_BOUND_AT_ONCE if at_once else SAFE_SCORE_BOUND
        return not all(bound <= safe for bound in score_bounds)

    def objections(self, sizes: FusedSizes) -> list[str]:
        """Why this launch cannot compute such a model; empty where it can."""
        reasons = []
        if sizes.d_model > WIDEST:
            reasons.append(f"d_model = {sizes.d_model} exceeds {WIDEST}, what a tile holds")
        if sizes.head_dim < 8:
            reasons.append(f"head_dim = {sizes.head_dim} is below eight")
        if self.form == "single" and power_of_two(sizes.tokens) > self.rows:
            reasons.append(f"{sizes.tokens} tokens do not fit a tile of {self.rows} rows")
        if self.form in ("wavefront", "strips") and not sizes.causal:
            reasons.append("a tile would wait on later tiles: not causal")
        chunks = {"chunk": self.chunk, "qkv_chunk": self.qkv_chunk, "rows": self.rows}
        for knob, value in {**chunks, "keys": self.keys, "warps": self.warps}.items():
            if value != power_of_two(value):
                reasons.append(f"{knob} = {value} is no power of two")
        if sizes.hidden % min(self.chunk, sizes.hidden):
            reasons.append(
                f"a hidden layer of {sizes.hidden} columns is no multiple of chunk = {self.chunk}"
            )
        return reasons + (self._strips_objections(sizes) if self.form == "strips" else [])

    def _strips_objections(self, sizes: FusedSizes) -> list[str]:
        reasons = []
        if power_of_two(sizes.tokens) > LONGEST_STRIPS:
            reasons.append(f"{sizes.tokens} tokens exceed the {LONGEST_STRIPS} keys of a strip")
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
        # A piece of a matrix holds whole rounds of the warps, sixteen bytes a lane.
        least = max(32, 8 * self.warps)
        pieces = {
            "chunk": (self.chunk, sizes.hidden),
            "qkv_chunk": (self.qkv_chunk, 2 * sizes.heads_width),
            "the share of a pass": (sizes.heads_width // self.passes, sizes.heads_width),
        }
        for piece, (columns, whole) in pieces.items():
            if columns < min(least, whole):
                reasons.append(f"{piece} has {columns} columns, fewer than {least}")
        return reasons

    def as_dict(self) -> dict[str, Any]:
        """The knobs that differ from their defaults, and the form: what an admission records."""
        known = {field.name: field.default for field in fields(self)}
        return {key: value for key, value in asdict(self).items() if value != known[key]}

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Launch:
        """The launch that ``as_dict`` wrote.

        Raises:
            ValueError: an unknown knob, or a value of the wrong kind.
        """
        known = {field.name: field.default for field in fields(cls)}
        for key, value in values.items():
            if key not in known:
                raise ValueError(f"a fused launch has no knob {key!r}; it has {sorted(known)}")
            if key == "form":
                if value not in get_args(Form):
                    raise ValueError(f"form = {value!r} is not one of {get_args(Form)}")
            elif type(value) is not type(known[key]):
                raise ValueError(f"{key} = {value!r} is not {type(known[key]).__name__}")
        if "form" not in values:
            raise ValueError(f"a fused launch needs a form, one of {get_args(Form)}")
        return cls(**values)  # type: ignore[arg-type]


def sizes_for(launch: Launch, config: TransformerConfig) -> FusedSizes:
    """``config`` as ``launch`` sees it: strips pad narrow heads that the other forms pair."""
    return FusedSizes(
        batch=config.batch_size,
        tokens=config.seq_len,
        d_model=config.d_model,
        num_heads=config.num_heads,
        ffn_dim=config.ffn_dim,
        num_layers=config.num_layers,
        causal=config.causal,
        narrowest_head=16 if launch.form == "strips" else 8,
    )

"""Which launches of the fused kernels are worth considering, as data. Imports no torch, no triton.

``MEASURED`` lists, for a compute capability and a disclosed case, at most two launches, the faster
first, each with what was measured; ``COMPILED`` does so for the capabilities on which nothing was
measured, by what fits a block there; ``GENERAL`` is for every other shape, in order of preference.
What runs is decided by admissions, not here.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastlayer.cases import case_of
from fastlayer.config import TransformerConfig
from fastlayer.kernels.knobs import Launch, sizes_for


@dataclass(frozen=True, slots=True)
class Row:
    """A launch and why it is listed.

    With ``one_wave`` it is meant for batches whose programs run all at once, one to a
    multiprocessor; with ``keys_at_once`` for sequences that are one block of keys, or for those
    that are not.
    """

    launch: Launch
    reason: str
    one_wave: bool = False
    keys_at_once: bool | None = None

    def suits(self, config: TransformerConfig, multiprocessors: int) -> bool:
        """Whether it can compute ``config``, and is meant for it on such a device."""
        sizes = sizes_for(self.launch, config)
        if self.launch.objections(sizes):
            return False
        if self.keys_at_once not in (None, self.launch.takes_keys_at_once(sizes)):
            return False
        return not self.one_wave or self.launch.programs(sizes) <= multiprocessors


#: Capabilities the kernels are compiled for in CI, as Triton writes them.
CAPABILITIES: tuple[int, ...] = (80, 86, 89, 90, 100, 120)

_EARLY = Launch("strips", rows=16, chunk=128)
_LATE = Launch("strips", rows=16, chunk=128, early=False)
_TILES = Launch("wavefront")
_TILES_HALF = Launch("wavefront", qkv_chunk=64)
_TILES_TWO = Launch("wavefront", stages=2)
_WHOLE = Launch("single", rows=128, warps=8, chunk=128)
_WHOLE_SMALL = Launch("single", rows=128, warps=8, stages=2)
_LAYERS_THREE = Launch(
    "layers", keys=64, qkv_chunk=64, chunk=32, stages=2, attention_stages=3, max_registers=168
)
_LAYERS_THREE_WIDER = Launch(
    "layers", keys=64, qkv_chunk=64, stages=2, attention_stages=3, max_registers=168
)
_TILES_LONG = Launch("wavefront", keys=64, flat=True, stages=2, attention_stages=1)
_LAYERS_SMALL = Launch("layers", keys=64, qkv_chunk=64, stages=2)

#: NVIDIA H200, triton 3.6.0, ptxas 12.8: milliseconds of a replayed graph, by call where several.
_SM90: dict[int, tuple[Row, ...]] = {
    1: (
        Row(_TILES, ".058, .058: 128 programs for 132 multiprocessors; whole sequences .066"),
        Row(_TILES_HALF, ".059, .060"),
    ),
    2: (
        Row(_EARLY, ".031: one warp to a head and weights a stage ahead; keys split in two .038"),
        Row(_LATE, ".032"),
    ),
    3: (Row(_LATE, ".033; 32 rows .044"), Row(_EARLY, ".033")),
    4: (Row(_EARLY, ".033"), Row(_LATE, ".033")),
    5: (Row(_WHOLE, ".065: nothing to exchange; hidden columns in halves .069; tiles .085"),),
    6: (Row(_WHOLE, "4.60; hidden columns in halves 4.87, tiles 6.2"),),
    7: (Row(_TILES, ".027, .027: paired heads of eight; whole sequences .033, strips .037"),),
    9: (
        Row(_TILES_HALF, ".054, .056; three stages spill 200 bytes since V keeps its bias"),
        Row(_TILES, ".056, .056; two stages .069"),
    ),
    10: (Row(_TILES, ".052, .054, .053"), Row(_TILES_TWO, ".053, .058")),
    11: (Row(_TILES, ".092, .092: paired heads; whole sequences .13"), Row(_TILES_TWO, ".100")),
    12: (Row(_LATE, ".025"), Row(_EARLY, ".025")),
    13: (
        Row(_LAYERS_THREE, ".598: three blocks a multiprocessor; two .685, in one launch .76"),
        Row(_LAYERS_THREE_WIDER, ".623: its registers spill 24 bytes"),
    ),
}

MEASURED: dict[tuple[int, int], dict[int, tuple[Row, ...]]] = {(9, 0): _SM90}

_FITS = "not measured; fits 101,376 bytes of shared memory"
COMPILED: dict[int, tuple[Row, ...]] = {
    **{case: (Row(_LATE, _FITS),) for case in (2, 3, 4, 12)},
    **{case: (Row(_TILES_TWO, _FITS),) for case in (1, 7, 10, 11)},
    **{case: (Row(_WHOLE_SMALL, _FITS),) for case in (5, 6)},
    9: (Row(_TILES_LONG, _FITS),),
    13: (Row(_LAYERS_SMALL, _FITS),),
}

GENERAL: tuple[Row, ...] = (
    Row(_LATE, "cases 2-4 and 12: low strips give a small batch the most programs", one_wave=True),
    Row(_TILES_TWO, "cases 1, 9-11: two tiles of a sequence", one_wave=True, keys_at_once=True),
    Row(
        _TILES_LONG, "not measured; heads of 128 columns fit too", one_wave=True, keys_at_once=False
    ),
    Row(_WHOLE_SMALL, "cases 5 and 6: a batch that fills the device exchanges nothing"),
    Row(_LAYERS_SMALL, "case 13, and full attention over several tiles"),
)


def candidates(
    config: TransformerConfig, capability: tuple[int, int], multiprocessors: int
) -> list[Launch]:
    """At most two launches for a shape on a device, the preferred first; none if none can."""
    case = case_of(config)
    rows = MEASURED.get(capability, COMPILED).get(0 if case is None else case)
    if rows is not None:
        return [row.launch for row in rows]
    return [row.launch for row in GENERAL if row.suits(config, multiprocessors)][:2]

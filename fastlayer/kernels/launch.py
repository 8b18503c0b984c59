"""How a fused kernel is launched: the knobs, the arguments, the workspace. No policy.

A ``Launch`` names a kernel form and its knobs; ``launch_model`` runs the whole model with it.
Importing this module imports triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fastlayer.config import TransformerConfig
from fastlayer.kernels.knobs import Launch
from fastlayer.kernels.packing import FusedWeights
from fastlayer.kernels.single import single_kernel
from fastlayer.kernels.sizes import FusedSizes, power_of_two
from fastlayer.kernels.strips import fragments, strips_kernel
from fastlayer.kernels.wavefront import layer_kernel, wavefront_kernel


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel launch: ``kernel[grid](*tensors, *scalars, **constants, **options)``."""

    kernel: Any
    grid: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    scalars: tuple[int, ...]
    constants: dict[str, Any]
    options: dict[str, Any]

    def __call__(self) -> Any:
        return self.kernel[self.grid](
            *self.tensors, *self.scalars, **self.constants, **self.options
        )


@dataclass(slots=True)
class Workspace:
    """What tiles exchange during a launch. One for each stream: two launches may not share one.

    ``flags`` are zero when new and consistent after every launch that ended; ``reset`` restores
    them after one that did not.
    """

    keys: torch.Tensor
    flags: torch.Tensor

    def reset(self) -> None:
        self.flags.zero_()


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


def new_workspace(launch: Launch, sizes: FusedSizes, device: torch.device | str) -> Workspace:
    """The workspace of ``launch``, empty for the form that needs none."""
    tiles = launch.tiles(sizes)
    # Blocks of keys may reach past the last tile.
    rows = sizes.batch * tiles * launch.rows + launch.keys
    copies, columns = {
        "single": (0, 0),
        "wavefront": (sizes.num_layers, 3 * sizes.heads_width),
        "layers": (2, 3 * sizes.heads_width),
        "strips": (sizes.num_layers, 2 * sizes.heads_width),
    }[launch.form]
    # Zeros, not whatever was there: a masked probability of zero times a stale NaN is NaN.
    keys = torch.zeros(max(1, copies * rows * columns), dtype=torch.float16, device=device)
    flags = torch.zeros(sizes.batch * power_of_two(tiles), dtype=torch.int32, device=device)
    return Workspace(keys, flags)


@dataclass(frozen=True, slots=True)
class Operands:
    """``FusedWeights`` in the order in which a launch's kernels take them."""

    tensors: tuple[torch.Tensor, ...]
    maximum: bool


def operands(launch: Launch, sizes: FusedSizes, weights: FusedWeights) -> Operands:
    """The operands of ``launch``; for strips the matrices are laid in fragment order."""
    rest = (weights.biases, weights.final)
    maximum = launch.keeps_maximum(weights.score_bounds)
    if launch.form != "strips":
        return Operands(
            (weights.qkv, weights.out, weights.ffn_in, weights.ffn_out, *rest), maximum
        )
    query, keys_values = weights.qkv.split([sizes.heads_width, 2 * sizes.heads_width], dim=2)
    part = sizes.heads_width // launch.passes
    chunk = min(launch.chunk, sizes.hidden)
    pieces = (
        (query, sizes.width),
        (keys_values, sizes.width),
        (weights.out, part),
        (weights.ffn_in, sizes.width),
        (weights.ffn_out, chunk),
    )
    matrices = (fragments(matrix, launch.warps, depth) for matrix, depth in pieces)
    return Operands((*matrices, *rest), maximum)


def steps(
    launch: Launch,
    sizes: FusedSizes,
    packed: Operands,
    workspace: Workspace,
    x: torch.Tensor,
    out: torch.Tensor,
    lengths: torch.Tensor | None,
) -> list[Step]:
    """The kernel launches that write the model's output for ``x [B, N, d]`` to ``out``.

    ``x`` and ``out`` are float32 and contiguous; ``lengths [B]`` int32 counts each sample's valid
    tokens, None where all are.
    """
    return _FORMS[launch.form](
        launch, sizes, packed, workspace, x, out, x if lengths is None else lengths
    )


def _common(launch: Launch, sizes: FusedSizes, packed: Operands, lengths: bool) -> dict[str, Any]:
    return {
        "D": sizes.d_model,
        "W": sizes.width,
        "F": sizes.hidden,
        "LAYERS": sizes.num_layers,
        "LENGTHS": lengths,
        "ROWS": launch.rows,
        "MAXIMUM": packed.maximum,
        "EXACT_GELU": launch.exact_gelu,
    }


def _grouped(sizes: FusedSizes) -> dict[str, Any]:
    return {
        "GROUPS": sizes.groups,
        "GROUP": sizes.group_width,
        "HEADS": sizes.heads_per_group,
        "G": sizes.heads_width,
    }


def _single(launch, sizes, packed, workspace, x, out, lengths):  # type: ignore[no-untyped-def]
    span = power_of_two(sizes.tokens)
    constants = {
        **_common(launch, sizes, packed, lengths is not x),
        **_grouped(sizes),
        "CAUSAL": sizes.causal,
        "SPAN": span,
        "CHUNK": min(launch.chunk, sizes.hidden),
        "STAGES": launch.stages,
    }
    grid = (-(-sizes.batch // (launch.rows // span)),)
    tensors = (x, out, *packed.tensors, lengths)
    scalars = (sizes.batch, sizes.tokens)
    return [Step(single_kernel, grid, tensors, scalars, constants, launch.options)]


def _tiled(launch, sizes, packed, lengths):  # type: ignore[no-untyped-def]
    tiles = launch.tiles(sizes)
    return {
        **_common(launch, sizes, packed, lengths),
        **_grouped(sizes),
        "KEYS": launch.keys,
        "ONCE": tiles * launch.rows <= launch.keys,
        "QKV_CHUNK": min(launch.qkv_chunk, sizes.heads_width),
        "CHUNK": min(launch.chunk, sizes.hidden),
        "STAGES": launch.stages,
    }


def _wavefront(launch, sizes, packed, workspace, x, out, lengths):  # type: ignore[no-untyped-def]
    tiles = launch.tiles(sizes)
    constants = {
        **_tiled(launch, sizes, packed, lengths is not x),
        "TILES": power_of_two(tiles),
        "BY_TILE": launch.by_tile,
    }
    tensors = (x, out, *packed.tensors, lengths, workspace.keys, workspace.flags)
    scalars = (sizes.batch, sizes.tokens, tiles)
    grid = (sizes.batch * tiles,)
    return [Step(wavefront_kernel, grid, tensors, scalars, constants, launch.options)]


def _layers(launch, sizes, packed, workspace, x, out, lengths):  # type: ignore[no-untyped-def]
    tiles = launch.tiles(sizes)
    constants = {**_tiled(launch, sizes, packed, lengths is not x), "CAUSAL": sizes.causal}
    grid = (sizes.batch * tiles,)
    last = sizes.num_layers

    def part(layer: int, attend: bool, project: bool) -> Step:
        # Until the first layer is done, the residual is the input itself.
        source = x if layer - attend < 1 else out
        tensors = (source, out, *packed.tensors, lengths, workspace.keys)
        scalars = (sizes.batch, sizes.tokens, tiles, layer)
        parts = {"ATTEND": attend, "PROJECT": project, "LAST": layer == last}
        return Step(layer_kernel, grid, tensors, scalars, {**constants, **parts}, launch.options)

    result = [part(0, False, True)]
    for layer in range(1, last + 1):
        if launch.apart and layer < last:
            result += [part(layer, True, False), part(layer, False, True)]
        else:
            result.append(part(layer, True, layer < last))
    return result


def _strips(launch, sizes, packed, workspace, x, out, lengths):  # type: ignore[no-untyped-def]
    strips = launch.tiles(sizes)
    constants = {
        **_common(launch, sizes, packed, lengths is not x),
        "H": sizes.heads_width // sizes.padded_head,
        "HEAD": sizes.padded_head,
        "STRIPS": power_of_two(strips),
        "KEYS": power_of_two(strips * launch.rows),
        "PASSES": launch.passes,
        "QKV_CHUNK": min(launch.qkv_chunk, 2 * sizes.heads_width),
        "CHUNK": min(launch.chunk, sizes.hidden),
        "WARPS": launch.warps,
        "EARLY": launch.early,
    }
    tensors = (x, out, *packed.tensors, lengths, workspace.keys, workspace.flags)
    scalars = (sizes.batch, sizes.tokens, strips)
    grid = (sizes.batch * strips,)
    return [Step(strips_kernel, grid, tensors, scalars, constants, launch.options)]


_FORMS: dict[str, Callable[..., list[Step]]] = {
    "single": _single,
    "wavefront": _wavefront,
    "layers": _layers,
    "strips": _strips,
}


def launch_model(
    launch: Launch,
    sizes: FusedSizes,
    packed: Operands,
    workspace: Workspace,
    x: torch.Tensor,
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """The model's output ``[B, N, d]`` for ``x``; see ``steps``."""
    out = torch.empty_like(x)
    for step in steps(launch, sizes, packed, workspace, x, out, lengths):
        step()
    return out

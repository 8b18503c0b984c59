"""From a ``Launch`` and a model's operands to kernel launches. No policy. Imports triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from fastlayer.config import TransformerConfig
from fastlayer.kernels.knobs import Launch, sizes_for
from fastlayer.kernels.packing import FusedWeights
from fastlayer.kernels.single import single_kernel
from fastlayer.kernels.sizes import FusedSizes, power_of_two
from fastlayer.kernels.strips import fragments, strips_kernel
from fastlayer.kernels.wavefront import layer_kernel, wavefront_kernel


@dataclass(frozen=True, slots=True)
class Operands:
    """``FusedWeights`` in the order in which a launch's kernels take them.

    ``maximum`` says whether softmax must subtract its maximum.
    """

    tensors: tuple[torch.Tensor, ...]
    maximum: bool


@dataclass(frozen=True, slots=True)
class Workspace:
    """What tiles exchange during a launch. One for each stream: two launches may not share one.

    The flags count up through all launches, and every launch leaves them equal within a sequence,
    also one that gave up waiting, so nothing clears them.
    """

    keys: torch.Tensor
    flags: torch.Tensor


def new_workspace(launch: Launch, sizes: FusedSizes, device: torch.device | str) -> Workspace:
    """The workspace of ``launch``, next to nothing for the form that needs none."""
    keys, flags = launch.workspace_elements(sizes)
    # Zeros, not whatever was there: a masked probability of zero times a stale NaN is NaN.
    return Workspace(
        torch.zeros(keys, dtype=torch.float16, device=device),
        torch.zeros(flags, dtype=torch.int32, device=device),
    )


def operands(launch: Launch, sizes: FusedSizes, weights: FusedWeights) -> Operands:
    """The operands of ``launch``; for strips the matrices are laid in fragment order."""
    rest = (weights.biases, weights.final)
    maximum = launch.keeps_maximum(weights.score_bounds, sizes)
    if launch.form != "strips":
        return Operands((weights.qkv, weights.out, weights.ffn_in, weights.ffn_out, *rest), maximum)
    query, keys_values = weights.qkv.split([sizes.heads_width, 2 * sizes.heads_width], dim=2)
    pieces = (
        (query, sizes.width),
        (keys_values, sizes.width),
        (weights.out, sizes.heads_width // launch.passes),
        (weights.ffn_in, sizes.width),
        (weights.ffn_out, min(launch.chunk, sizes.hidden)),
    )
    matrices = (fragments(matrix, launch.warps, depth) for matrix, depth in pieces)
    return Operands((*matrices, *rest), maximum)


def _is_observed() -> bool:
    """Whether a profiler, or anyone else, asked Triton to be told of launches."""
    # Each is a chain of hooks, empty unless one was added, or what somebody put in its place.
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@dataclass(slots=True)
class Step:
    """One kernel launch of a program, everything fixed but the input, the output, the lengths.

    ``continues`` says that it reads the residual from the output rather than from the input.
    """

    kernel: Any
    programs: int
    weights: tuple[torch.Tensor, ...]
    exchange: tuple[torch.Tensor, ...]
    scalars: tuple[int, ...]
    constants: dict[str, Any]
    options: dict[str, Any]
    continues: bool = False
    _compiled: Any = field(default=None, repr=False)
    _run: Callable[..., None] | None = field(default=None, repr=False)
    _fixed: tuple[Any, ...] = field(default=(), repr=False)
    _head: tuple[int, ...] = field(default=(), repr=False)
    _tail: tuple[Any, ...] = field(default=(), repr=False)

    def arguments(
        self, x: torch.Tensor, out: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The kernel's tensors, its first arguments."""
        source = out if self.continues else x
        return (source, out, *self.weights, lengths, *self.exchange)

    def first(self, x: torch.Tensor, out: torch.Tensor, lengths: torch.Tensor) -> bool:
        """Launches through Triton, which compiles; whether ``again`` may serve from now on."""
        tensors = self.arguments(x, out, lengths)
        grid = (self.programs, 1, 1)
        compiled = self.kernel[grid](*tensors, *self.scalars, **self.constants, **self.options)
        if compiled is None:  # The interpreter compiles nothing.
            return False
        names = self.kernel.arg_names[len(tensors) + len(self.scalars) :]
        self._compiled = compiled
        self._run = compiled.run
        # What a launcher takes before the arguments: the kernel; no metadata of the launch, no
        # hook on entry and none on exit.
        self._fixed = (compiled.function, compiled.packed_metadata, None, None, None)
        self._head = tuple(tensor.data_ptr() for tensor in self.weights)
        self._tail = (
            *(tensor.data_ptr() for tensor in self.exchange),
            *self.scalars,
            *(self.constants[name] for name in names),
        )
        return True

    def again(self, x: int, out: int, lengths: int, stream: int) -> None:
        """The same launch with other addresses, on ``stream``.

        Triton's own dispatch would look every argument over again, and ask the driver about every
        tensor; its launcher takes addresses as they are.
        """
        assert self._run is not None
        if self.continues:
            x = out
        self._run(
            self.programs, 1, 1, stream, *self._fixed, x, out, *self._head, lengths, *self._tail
        )

    def observed(self, x: int, out: int, lengths: int, stream: int) -> None:
        """As ``again``, with the metadata that Triton's launch hooks are given."""
        source = out if self.continues else x
        launch = self._compiled[self.programs, 1, 1]
        launch(source, out, *self._head, lengths, *self._tail, stream=stream)


class Program:
    """The whole model for one shape, mask presence and stream: ``program(x, out, lengths)``."""

    def __init__(
        self,
        launch: Launch,
        sizes: FusedSizes,
        packed: Operands,
        workspace: Workspace,
        masked: bool,
    ) -> None:
        self.steps: list[Step] = _FORMS[launch.form](launch, sizes, packed, workspace, masked)
        self._ready = False

    def __call__(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        lengths: torch.Tensor | None = None,
        stream: int | None = None,
    ) -> None:
        """Writes the model's output for ``x [B, N, d]`` to ``out``, on the current stream.

        ``x`` and ``out`` are float32, contiguous and aligned to sixteen bytes; ``lengths [B]``
        int32 counts each sample's valid tokens and is given exactly if the program is masked.
        ``stream`` is the current stream's handle, for callers who know it already.
        """
        if not self._ready:
            last = x if lengths is None else lengths
            compiled = [step.first(x, out, last) for step in self.steps]
            self._ready = all(compiled)
            return
        if stream is None:
            stream = torch.cuda.current_stream(x.device).cuda_stream
        source, target = x.data_ptr(), out.data_ptr()
        counts = source if lengths is None else lengths.data_ptr()
        if _is_observed():
            for step in self.steps:
                step.observed(source, target, counts, stream)
            return
        for step in self.steps:
            step.again(source, target, counts, stream)


def _common(launch: Launch, sizes: FusedSizes, packed: Operands, masked: bool) -> dict[str, Any]:
    return {
        "D": sizes.d_model,
        "W": sizes.width,
        "F": sizes.hidden,
        "LAYERS": sizes.num_layers,
        "LENGTHS": masked,
        "ROWS": launch.rows,
        "SCALE": sizes.score_scale,
        "MAXIMUM": packed.maximum,
        "EXACT_GELU": launch.exact_gelu,
        "CHUNK": min(launch.chunk, sizes.hidden),
    }


def _grouped(launch: Launch, sizes: FusedSizes) -> dict[str, Any]:
    return {
        "GROUPS": sizes.groups,
        "GROUP": sizes.group_width,
        "HEADS": sizes.heads_per_group,
        "G": sizes.heads_width,
        "STAGES": launch.stages,
    }


def _tiled(launch: Launch, sizes: FusedSizes) -> dict[str, Any]:
    return {
        **_grouped(launch, sizes),
        "KEYS": launch.keys,
        "ATTENTION_STAGES": launch.attention_stages or launch.stages,
        "QKV_CHUNK": min(launch.qkv_chunk, sizes.heads_width),
    }


def _single(
    launch: Launch, sizes: FusedSizes, packed: Operands, workspace: Workspace, masked: bool
) -> list[Step]:
    span = power_of_two(sizes.tokens)
    constants = {
        **_common(launch, sizes, packed, masked),
        **_grouped(launch, sizes),
        "CAUSAL": sizes.causal,
        "SPAN": span,
    }
    programs, scalars = launch.programs(sizes), (sizes.batch, sizes.tokens)
    return [Step(single_kernel, programs, packed.tensors, (), scalars, constants, launch.options)]


def _wavefront(
    launch: Launch, sizes: FusedSizes, packed: Operands, workspace: Workspace, masked: bool
) -> list[Step]:
    tiles = launch.tiles(sizes)
    constants = {
        **_common(launch, sizes, packed, masked),
        **_tiled(launch, sizes),
        "TILES": power_of_two(tiles),
        "ONCE": launch.takes_keys_at_once(sizes),
        "FLAT": launch.flat,
        "BY_TILE": launch.by_tile,
    }
    exchange = (workspace.keys, workspace.flags)
    scalars = (sizes.batch, sizes.tokens, tiles)
    programs = sizes.batch * tiles
    kernel = wavefront_kernel
    return [Step(kernel, programs, packed.tensors, exchange, scalars, constants, launch.options)]


def _layers(
    launch: Launch, sizes: FusedSizes, packed: Operands, workspace: Workspace, masked: bool
) -> list[Step]:
    tiles, last = launch.tiles(sizes), sizes.num_layers
    constants = {
        **_common(launch, sizes, packed, masked),
        **_tiled(launch, sizes),
        "CAUSAL": sizes.causal,
    }

    def part(layer: int, attend: bool, project: bool) -> Step:
        return Step(
            layer_kernel,
            sizes.batch * tiles,
            packed.tensors,
            (workspace.keys,),
            (sizes.batch, sizes.tokens, tiles, layer),
            {**constants, "ATTEND": attend, "PROJECT": project, "LAST": layer == last},
            launch.options,
            # Until the first layer is done, the residual is the input itself.
            continues=layer - attend >= 1,
        )

    result = [part(0, False, True)]
    for layer in range(1, last + 1):
        if launch.apart and layer < last:
            result += [part(layer, True, False), part(layer, False, True)]
        else:
            result.append(part(layer, True, layer < last))
    return result


def _strips(
    launch: Launch, sizes: FusedSizes, packed: Operands, workspace: Workspace, masked: bool
) -> list[Step]:
    strips = launch.tiles(sizes)
    constants = {
        **_common(launch, sizes, packed, masked),
        "H": sizes.heads_width // sizes.padded_head,
        "HEAD": sizes.padded_head,
        "STRIPS": power_of_two(strips),
        "KEYS": power_of_two(strips * launch.rows),
        "PASSES": launch.passes,
        "QKV_CHUNK": min(launch.qkv_chunk, 2 * sizes.heads_width),
        "WARPS": launch.warps,
        "EARLY": launch.early,
    }
    exchange = (workspace.keys, workspace.flags)
    scalars = (sizes.batch, sizes.tokens, strips)
    programs = sizes.batch * strips
    kernel = strips_kernel
    return [Step(kernel, programs, packed.tensors, exchange, scalars, constants, launch.options)]


_FORMS: dict[str, Callable[[Launch, FusedSizes, Operands, Workspace, bool], list[Step]]] = {
    "single": _single,
    "wavefront": _wavefront,
    "layers": _layers,
    "strips": _strips,
}


def program(
    launch: Launch,
    config: TransformerConfig,
    weights: FusedWeights,
    *,
    masked: bool,
    device: torch.device | str,
) -> Program:
    """A program with a workspace of its own, from a model's folded weights."""
    sizes = sizes_for(launch, config)
    packed = operands(launch, sizes, weights)
    return Program(launch, sizes, packed, new_workspace(launch, sizes, device), masked)

"""What belongs to one model between calls: packed weights, and whether they are still current.

Freshness is checked on every call, see ``fastlayer.watch``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import nn

from fastlayer.alterations import alteration
from fastlayer.config import TransformerConfig
from fastlayer.graphs import GraphCache
from fastlayer.reference import ReferenceBlock
from fastlayer.watch import Prover, Watch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The live parameters of one block. Weights ``[out, in]``, biases ``[out]``."""

    norm1: tuple[torch.Tensor, torch.Tensor]
    q: tuple[torch.Tensor, torch.Tensor]
    k: tuple[torch.Tensor, torch.Tensor]
    v: tuple[torch.Tensor, torch.Tensor]
    out: tuple[torch.Tensor, torch.Tensor]
    norm2: tuple[torch.Tensor, torch.Tensor]
    ffn_in: tuple[torch.Tensor, torch.Tensor]
    ffn_out: tuple[torch.Tensor, torch.Tensor]

    def packed_qkv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """New tensors: weight ``[3 d, d]`` and bias ``[3 d]``, q over k over v."""
        weights, biases = zip(self.q, self.k, self.v, strict=True)
        return torch.cat(weights), torch.cat(biases)


class ModelState:
    """Everything a route may keep for one model; all of it is dropped when the model changes.

    Attributes:
        module: the ``FastTransformer`` itself.
        config: its shape; the batch and length of a call are in the contract.
        graphs: captured CUDA graphs.
        notes: what a route did otherwise than its launch says (a failed capture, a halved slice);
            the model moves them into ``last_decision``, where they stay.
        measured: what the last call measured; in ``last_decision`` until the next call.
        version: grows by one whenever a parameter was edited, replaced or moved, or the module
            tree changed otherwise.
        altered: why the module tree is not the plain one, or "".
    """

    def __init__(self, module: nn.Module, config: TransformerConfig) -> None:
        self.module = module
        self.config = config
        self.graphs = GraphCache()
        self.notes: list[str] = []
        self.measured: tuple[str, ...] = ()
        self.version = 0
        self.altered = ""
        self._packs: dict[Hashable, object] = {}
        self._watch: Watch | None = None
        self._prover: Prover | None = None

    def refresh(self, capturing: bool = False) -> int:
        """Drops what was derived from the module tree if anything in it changed; the version.

        ``capturing``: a CUDA graph of the caller's is being captured.
        """
        watch = self._watch
        if watch is None or not watch.unchanged(capturing):
            self.invalidate()
            try:
                self._watch = Watch(self.module, self._prover)
            except RuntimeError as error:  # of a transform's stand-ins for parameters
                told = str(error).strip().splitlines()[0]
                self.altered = f"a parameter cannot be watched ({told})"
            else:
                self.altered = alteration(self.module, self.config)
        return self.version

    def prove_by(self, prover: Prover | None) -> None:
        """Looks things over by ``prover`` from now on, where that serves."""
        self._prover = prover
        if self._watch is not None:
            self._watch.prover = prover

    @property
    def is_proved(self) -> bool:
        """Whether compiled code answers for an unchanged model."""
        return self._watch is not None and self._watch.is_proved

    @property
    def requires_grad(self) -> bool:
        """Whether autograd would follow some parameter; not part of the version."""
        return self._watch is not None and self._watch.requires_grad()

    def invalidate(self) -> None:
        """Drops packed weights and graphs unconditionally."""
        self.version += 1
        self._packs.clear()
        self.graphs.clear()
        self._watch = None

    def get(self, key: Hashable, build: Callable[[], T]) -> T:
        """The value ``build`` derived from the present parameters, built once a version.

        ``build`` runs without autograd and outside inference mode. What it derives is of the
        version it began with, whatever another thread has noticed meanwhile.
        """
        dated = self.version, key
        if dated not in self._packs:
            with torch.inference_mode(False), torch.no_grad():
                self._packs[dated] = build()
        return cast(T, self._packs[dated])

    @property
    def layers(self) -> list[LayerWeights]:
        """The live parameters of every block (of a module tree that is not altered)."""
        return self.get("layers", lambda: [_layer_weights(layer) for layer in self._blocks()])

    @property
    def final_norm(self) -> tuple[torch.Tensor, torch.Tensor]:
        return _affine(cast(nn.LayerNorm, self.module.final_norm))

    def _blocks(self) -> list[ReferenceBlock]:
        return list(cast("list[ReferenceBlock]", self.module.layers))


def _affine(module: nn.Linear | nn.LayerNorm) -> tuple[torch.Tensor, torch.Tensor]:
    return module.weight.detach(), module.bias.detach()


def _layer_weights(block: ReferenceBlock) -> LayerWeights:
    attention = block.attention
    return LayerWeights(
        norm1=_affine(block.norm1),
        q=_affine(attention.q_proj),
        k=_affine(attention.k_proj),
        v=_affine(attention.v_proj),
        out=_affine(attention.out_proj),
        norm2=_affine(block.norm2),
        ffn_in=_affine(block.ffn_in),
        ffn_out=_affine(block.ffn_out),
    )

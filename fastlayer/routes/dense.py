"""The reference arithmetic itself: always right, and the memory of ``[B, H, N, N]`` scores."""

from __future__ import annotations

import torch

from fastlayer.contract import RuntimeContract
from fastlayer.reference import ReferenceTransformer
from fastlayer.routes.base import Bound, Launch, check_launch
from fastlayer.weights import ModelState


class DenseRoute:
    """Runs the modules as the reference does; its one objection is memory."""

    name = "dense"

    def objections(self, contract: RuntimeContract) -> list[str]:
        if contract.dense_fits:
            return []
        return [
            f"the dense scores and activations need {contract.dense_bytes:,} bytes and "
            f"{contract.available_bytes:,} are available"
        ]

    def launches(self, contract: RuntimeContract) -> list[Launch]:
        return [{}]

    def bind(self, state: ModelState, contract: RuntimeContract, launch: Launch) -> Bound:
        check_launch(self.name, launch, {})
        module = state.module

        def run(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            return ReferenceTransformer.forward(module, x, mask)  # type: ignore[arg-type]

        return run

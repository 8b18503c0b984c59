"""The cases' stress grid (``--fastlayer-stress``): the route that was chosen, on many inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from fastlayer import FastTransformer, TransformerConfig, make_inputs
from fastlayer.errors import RouteError, RouteRefused
from pytest_fastlayer.stress import Stress, padding_and_scale

#: Elements of an activation up to which the grid runs the whole batch. What is compared with must
#: round as it does in the case: case 7's reference computes scores in float32 at batch 8, and every
#: product at 16 and 32, but in TF32 at its own 64 (H200, cuBLAS of CUDA 13.0).
WHOLE_ELEMENTS = 2**20
#: Elements that a larger case is cut to, but no less than two samples.
REDUCED_ELEMENTS = 2**18


def stress_batch(config: TransformerConfig) -> int:
    """The batch of the grid: the case's own where a forward of it is short."""
    if config.activation_elements <= WHOLE_ELEMENTS:
        return config.batch_size
    sample = config.activation_elements // config.batch_size
    return min(config.batch_size, max(2, REDUCED_ELEMENTS // sample))


class Chosen:
    """The route and launch that the full-size case was given, whatever the batch.

    A small batch is no admitted case, so a strict model would run dense arithmetic and check
    nothing. Inputs that the route does not serve (a mask, say) take the first eligible one, and
    ``ran`` says so.
    """

    def __init__(self, build: Callable[..., FastTransformer], full: FastTransformer) -> None:
        decision = full.last_decision
        assert decision is not None  # it ran in the accuracy check
        self._models = [
            build(route=decision.route, launch=dict(decision.launch) or None),
            build(policy="eligible"),
        ]
        self._refused: set[int] = set()  #: numbers of arguments that the route does not serve
        self.ran = ""

    def __call__(self, *args: Any) -> Any:
        if len(args) not in self._refused:
            try:
                return self._run(self._models[0], args)
            except (RouteError, RouteRefused):
                self._refused.add(len(args))
        return self._run(self._models[1], args)

    def _run(self, model: FastTransformer, args: tuple[Any, ...]) -> Any:
        output = model(*args)
        decision = model.last_decision
        self.ran = "" if decision is None else decision.route
        return output


def stress_grid(
    build: Callable[..., FastTransformer],
    reference: nn.Module,
    config: TransformerConfig,
    device: str,
) -> Stress:
    """Padding ratios x input scales for one case.

    ``build(reference, config, **options)`` makes a model with the reference's weights.
    """
    small = replace(config, batch_size=stress_batch(config))

    def arguments(seed: int, padding_ratio: float, input_scale: float) -> tuple[Any, ...]:
        x, mask = make_inputs(small, seed, device, padding_ratio, input_scale)
        return (x,) if mask is None else (x, mask)

    def arms(full: Any) -> tuple[nn.Module, Chosen]:
        dense = type(reference)(small).to(device).eval()
        dense.load_state_dict(reference.state_dict(), strict=True)
        return dense, Chosen(partial(build, reference, small), full)

    return Stress(
        padding_and_scale(arguments),
        arms=arms,
        describe=lambda chosen: chosen.ran,
        note=f"batch {small.batch_size}",
    )

"""How a body is executed: eagerly, compiled by Inductor, replayed as a CUDA graph, or both."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastlayer.contract import RuntimeContract
from fastlayer.routes.base import Bound
from fastlayer.routes.body import Body
from fastlayer.weights import ModelState


def execute(body: Body, how: str, state: ModelState, contract: RuntimeContract) -> Bound:
    """``body`` made to run as ``how`` says; what could not be done is noted and runs eagerly."""
    compiled = how.startswith("compiled")
    run: Bound = _Compiled(body, state.notes.append) if compiled else body
    if how.endswith("graph"):
        return state.graphs.bind(run, state.notes.append)
    return run


class _Compiled:
    """A body through torch.compile, which runs eagerly for good once compilation has failed."""

    def __init__(self, body: Body, note: Callable[[str], None]) -> None:
        self._eager = body
        self._run: Bound = torch.compile(body.__call__, dynamic=False, fullgraph=True)
        self._note = note

    def __call__(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        from torch._dynamo.exc import TorchDynamoException

        try:
            return self._run(x, mask)
        except TorchDynamoException as error:
            self._run = self._eager
            reason = str(error).strip().splitlines()[0]
            self._note(f"compilation failed ({reason}); the route runs eagerly")
            return self._eager(x, mask)

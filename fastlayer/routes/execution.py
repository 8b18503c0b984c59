"""How a body is executed: eagerly, compiled by Inductor, replayed as a CUDA graph, or both."""

from __future__ import annotations

import itertools
import types
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
        self._run: Bound = torch.compile(_own_code(body), dynamic=False, fullgraph=True)
        self._note = note

    def __call__(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        try:
            return self._run(x, mask)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            self._run = self._eager
            reason = str(error).strip().splitlines()[0]
            self._note(f"compilation failed ({reason}); the route runs eagerly")
            return self._eager(x, mask)


_NUMBERS = itertools.count()


def _own_code(body: Body) -> Bound:
    """``body``'s method over a code object of its own.

    Dynamo counts recompilations by code object: if all bodies shared one, the ninth shape or model
    of a process would find the limit reached.
    """
    method = Body.__call__
    code = method.__code__.replace(co_name=f"body_{next(_NUMBERS)}")
    own: Bound = types.MethodType(types.FunctionType(code, method.__globals__), body)
    return own

"""What surrounds a call, told alike by torch's functions in C and by its public ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch

from fastlayer import ambient as module
from fastlayer.ambient import ambient

PUBLIC = {
    "_fp32_precision": module._public_fp32_precision,
    "_matmul_precision": torch.get_float32_matmul_precision,
    "_is_deterministic": torch.are_deterministic_algorithms_enabled,
    "_any_autocast": lambda: True,
}


@pytest.fixture(params=["as installed", "public"])
def _functions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "public":
        for name, function in PUBLIC.items():
            monkeypatch.setattr(module, name, function)


@contextmanager
def matmul(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    yield
    torch.set_float32_matmul_precision(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


PLAIN = (False, "", "highest", False, False, False)


@pytest.mark.usefixtures("_functions")
@pytest.mark.parametrize(
    ("within", "expected"),
    [
        (nullcontext, PLAIN),
        (torch.inference_mode, (True, *PLAIN[1:])),
        (lambda: torch.autocast("cpu", torch.bfloat16), (False, "bfloat16", *PLAIN[2:])),
        (lambda: torch.autocast("cpu", torch.float16), (False, "float16", *PLAIN[2:])),
        (lambda: torch.autocast("cpu", enabled=False), PLAIN),
        (lambda: matmul("high"), (False, "", "high", True, False, False)),
        (lambda: matmul("medium"), (False, "", "medium", True, False, False)),
        (deterministic, (False, "", "highest", False, True, False)),
    ],
    ids=[
        "plain",
        "inference",
        "bfloat16",
        "float16",
        "autocast off",
        "high",
        "medium",
        "same bits",
    ],
)
def test_the_state_around_a_call(
    within: Callable[[], AbstractContextManager[object]], expected: tuple[object, ...]
) -> None:
    x = torch.zeros(1)
    assert ambient(x) == PLAIN
    with within():
        assert ambient(x) == expected
    assert ambient(x) == PLAIN


@pytest.mark.usefixtures("_functions")
def test_autocast_elsewhere_does_not_concern_a_tensor() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert ambient(torch.zeros(1, device="meta"))[1] == ""

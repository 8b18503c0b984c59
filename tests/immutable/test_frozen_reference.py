"""A frozen reference notices every change to what decides its outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from pytest_fastlayer.fingerprint import fingerprint, fingerprints
from pytest_fastlayer.immutable import (
    ReferenceMutatedError,
    digest_callable,
    digest_file,
    freeze,
    held_tensors,
    load_reference,
)

SCALE = torch.ones(3)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5)
    ).train()


def test_freezing_puts_a_module_in_eval_mode_and_calls_without_gradients() -> None:
    frozen = freeze(model())
    x = torch.randn(5, 4, requires_grad=True)
    first, second = frozen(x), frozen(x)
    assert torch.equal(first, second)  # no dropout
    assert not first.requires_grad
    assert freeze(frozen) is frozen
    frozen.verify()


CHANGES: dict[str, Callable[[torch.nn.Module], object]] = {
    "the value of 0.weight": lambda m: m[0].weight.data[1, 2].add_(1e-6),
    "the value of 0.bias": lambda m: m[0].bias.data.neg_(),
    "the value of 1.running_mean": lambda m: m[1].running_mean.add_(1),
    "the training flag of 2": lambda m: m[2].train(),
    "requires_grad of 0.weight": lambda m: m[0].weight.requires_grad_(False),
    "the forward code of 0": lambda m: setattr(m[0], "forward", lambda x: x),
    "the hooks of 0": lambda m: m[0].register_forward_hook(lambda *_: None),
    "the value of 0.extra was added": lambda m: m[0].register_buffer("extra", torch.ones(1)),
    "the value of 1.running_var was removed": lambda m: delattr(m[1], "running_var"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_named(change: str) -> None:
    module = model()
    frozen = freeze(module)
    CHANGES[change](module)
    assert any(one.startswith(change) for one in frozen.changes())
    with pytest.raises(ReferenceMutatedError, match="changed after it was frozen"):
        frozen.verify()


def test_using_a_reference_is_no_change() -> None:
    module = model()
    frozen = freeze(module)
    frozen(torch.randn(5, 4))
    torch.nn.functional.linear(torch.randn(5, 4), module[0].weight)
    frozen.verify()


def test_tensors_that_a_function_holds_are_watched() -> None:
    weight = torch.ones(3)
    layer = torch.nn.Linear(3, 3)

    def closure(x: torch.Tensor) -> torch.Tensor:
        return layer(x) * weight

    class Bound:
        def __init__(self) -> None:
            self.weight = torch.ones(3)

        def call(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    bound = Bound()
    for target, tensor in (
        (closure, weight),
        (closure, layer.weight.data),
        (functools.partial(functional.linear, weight=layer.weight), layer.weight.data),
        (bound.call, bound.weight),
        (scaled, SCALE),
    ):
        frozen = freeze(target)
        frozen.verify()
        tensor.add_(1)
        with pytest.raises(ReferenceMutatedError):
            frozen.verify()
        tensor.sub_(1)
    assert set(held_tensors(layer)) == {"weight", "bias"}


def test_what_is_no_callable_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a callable"):
        freeze(3)  # type: ignore[arg-type]


def test_a_source_file_is_digested_and_watched(tmp_path: Path) -> None:
    source = tmp_path / "reference.py"
    source.write_text("x = 1\n")
    frozen = freeze(scaled, source=source)
    assert frozen.sha256 == digest_file(source)
    source.write_text("x = 2\n")
    with pytest.raises(ReferenceMutatedError, match=r"source .*reference\.py"):
        frozen.verify()


def test_digests_follow_the_source_text_alone(tmp_path: Path) -> None:
    def load(name: str, before: str, body: str) -> type:
        path = tmp_path / f"{name}.py"
        path.write_text(f"{before}\nclass Baseline:\n    def __call__(self, x):\n        {body}\n")
        return load_reference(f"{path}:Baseline")

    first = load("first", "a = 1", "return x + 1")
    moved = load("moved", "a = 2\n\n\n", "return x + 1")
    other = load("other", "a = 1", "return x + 2")
    assert digest_callable(first) == digest_callable(moved) == digest_callable(first())
    assert digest_callable(functools.partial(first)) == digest_callable(first)
    assert digest_callable(other) != digest_callable(first)


def test_library_code_is_named_not_read() -> None:
    """A new torch is a change of software, not another reference."""
    import hashlib

    name = hashlib.sha256(b"torch.nn.modules.normalization.LayerNorm").hexdigest()
    assert digest_callable(torch.nn.LayerNorm(3)) == name
    assert digest_callable(torch.sin) != digest_callable(torch.cos)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int8,
        torch.int64,
        torch.bool,
        torch.float8_e4m3fn,
    ],
)
def test_fingerprints_see_single_bits_and_order(dtype: torch.dtype) -> None:
    base = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 1.0]).to(dtype)
    same = base.clone()
    assert fingerprint(base) == fingerprint(same)
    swapped = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0]).to(dtype)
    assert fingerprint(base) != fingerprint(swapped)
    assert fingerprint(base) != fingerprint(base.reshape(2, 3))
    assert fingerprint(base.reshape(2, 3).t()) == fingerprint(base.reshape(2, 3).t().contiguous())
    if dtype.is_floating_point and base.element_size() > 1:
        assert fingerprint(base) != fingerprint(-base)  # 0 and -0 differ


def test_fingerprints_of_large_and_odd_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    big = torch.arange(1000.0).reshape(10, 100)
    whole = fingerprint(big)
    monkeypatch.setattr("pytest_fastlayer.fingerprint.default_chunk", lambda tensor: 64)
    assert fingerprint(big) == whole  # chunks do not matter
    moved = big.clone()
    moved[3, 3], moved[7, 7] = big[7, 7], big[3, 3]
    assert fingerprint(moved) != whole
    assert fingerprint(torch.empty(0)) == fingerprint(torch.empty(0))
    assert fingerprint(torch.zeros(2, device="meta"))[2] == "meta"
    assert len(fingerprints({"a": big, "b": (big, 3, None)})) == 2

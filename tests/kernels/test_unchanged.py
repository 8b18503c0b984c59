"""The compiled look-over: it never holds for unchanged what was changed, nor asks Python twice."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from triton.runtime import build

from fastlayer import CASES, FastTransformer
from fastlayer.kernels import unchanged
from fastlayer.watch import Prover, Watch


@pytest.fixture(scope="module")
def prover() -> Prover:
    made = unchanged.compiled()
    if made is None:
        pytest.skip("no C compiler")
    return made


@pytest.fixture
def watched(prover: Prover) -> Watch:
    watch = Watch(FastTransformer(CASES[12]), prover)
    assert watch.unchanged(False)
    return watch


class Holder:
    """As modules do, it keeps attributes, a dictionary and an ordered one, and has a getattr."""

    def __init__(self) -> None:
        self.one: object = 1
        self.other: object = None
        self.entries: dict[str, object] = {}
        self.hooks: OrderedDict[int, object] = OrderedDict()

    def __getattr__(self, name: str) -> object:
        raise AttributeError(name)

    @property
    def dictionaries(self) -> tuple[dict[Any, object], ...]:
        return vars(self), self.entries, self.hooks


def set_one(holder: Holder, value: object) -> None:
    holder.one = value  # in a function that runs often, so that Python specialises it


def set_other(holder: Holder, value: object) -> None:
    holder.other = value


WRITES: list[Callable[[Holder, Any], object]] = [
    set_one,
    set_other,
    lambda holder, value: setattr(holder, "one", value),
    lambda holder, value: object.__setattr__(holder, "other", value),
    lambda holder, value: vars(holder).__setitem__("added", value),
    lambda holder, value: vars(holder).pop("added", None),
    lambda holder, value: vars(holder).update(one=value),
    lambda holder, value: vars(holder).setdefault("late", value),
    lambda holder, value: vars(holder).pop("late", None),
    lambda holder, value: delattr(holder, "other") if "other" in vars(holder) else None,
    lambda holder, value: holder.entries.__setitem__("weight", value),
    lambda holder, value: holder.entries.__ior__({"bias": value}),
    lambda holder, value: holder.entries.popitem() if holder.entries else None,
    lambda holder, value: holder.entries.clear(),
    lambda holder, value: holder.hooks.__setitem__(id(value), value),
    lambda holder, value: holder.hooks.popitem() if holder.hooks else None,
    lambda holder, value: holder.hooks.clear(),
]


def flat(dictionary: dict[Any, object]) -> tuple[object, ...]:
    return tuple(chain.from_iterable(dictionary.items()))


def facts_of(prover: Prover, holders: list[Holder]) -> list[Any]:
    entries = [(each, flat(each)) for holder in holders for each in holder.dictionaries]
    facts: list[Any] = [(), tuple(chain.from_iterable(entries)), (), (), 0]
    prover.watch(facts)
    return facts


def is_same(facts: list[Any]) -> bool:
    entries = facts[1]
    return all(
        len(flat(now)) == len(held) and all(a is b for a, b in zip(flat(now), held, strict=True))
        for now, held in zip(entries[::2], entries[1::2], strict=True)
    )


@pytest.mark.parametrize("seed", range(4))
def test_every_write_to_a_dictionary_is_noticed(prover: Prover, seed: int) -> None:
    """By whichever way Python writes it: what a watcher is told of differs between versions."""
    draw = random.Random(seed)
    values = [object(), object(), 1, None, True]
    holders = [Holder() for _ in range(3)]
    facts = facts_of(prover, holders)
    seen = set()
    for _ in range(3000):
        for _ in range(draw.choice((0, 1, 1, 2))):
            draw.choice(WRITES)(draw.choice(holders), draw.choice(values))
        same = is_same(facts)
        assert prover.unchanged(facts) is same
        seen.add(same)
        if not same and draw.random() < 0.5:
            facts = facts_of(prover, holders)
    assert seen == {True, False}


def test_an_unchanged_model_is_not_compared_again(
    watched: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "_compare", None)
    for capturing in (False, True):
        assert watched.unchanged(capturing)


def test_an_equal_value_is_compared_once(prover: Prover, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FastTransformer(CASES[12])
    watch = Watch(model, prover)
    compared: list[bool] = []
    compare = watch._compare

    def counted(capturing: bool) -> bool:
        compared.append(compare(capturing))
        return compared[-1]

    monkeypatch.setattr(watch, "_compare", counted)
    assert watch.unchanged(False)
    model.final_norm.eps = float("1e-5")
    for _ in range(3):
        assert watch.unchanged(False)
    assert compared == [True] * 4, "before and after collecting, for each of the two values"


@pytest.mark.parametrize("moment", ["before collecting", "after collecting", "at the end"])
def test_a_change_while_facts_are_collected_is_noticed(
    prover: Prover, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another thread, at the latest by the next call."""
    model = FastTransformer(CASES[12]).requires_grad_(False)
    watch = Watch(model, prover)
    collect, compare = watch._collect, watch._compare
    compared: list[bool] = []

    def edited(now: str) -> None:
        if now == moment:
            model.final_norm.bias.add_(1.0)

    def collecting(by: Prover) -> list[Any]:
        edited("before collecting")
        facts = collect(by)
        edited("after collecting")
        return facts

    def comparing(capturing: bool) -> bool:
        compared.append(compare(capturing))
        if len(compared) == 2:
            edited("at the end")
        return compared[-1]

    monkeypatch.setattr(watch, "_collect", collecting)
    monkeypatch.setattr(watch, "_compare", comparing)
    assert watch.unchanged(False) is (moment == "at the end")
    assert not watch.unchanged(False)


def test_a_model_goes_with_its_facts(prover: Prover) -> None:
    model = FastTransformer(CASES[12])
    state, held = model._runtime.state, weakref.ref(model.layers[0].ffn_in.weight)
    state.prove_by(prover)
    assert state.refresh() == state.refresh()
    assert state._watch is not None
    assert state._watch._facts
    facts = state._watch._facts
    before = sys.getrefcount(facts[3])
    for _ in range(1000):
        assert prover.unchanged(facts)
    after = sys.getrefcount(facts[3])
    assert after == before
    del model, state, facts
    gc.collect()
    assert held() is None


@pytest.fixture
def _forgotten() -> Iterator[None]:
    unchanged.compiled.cache_clear()
    yield
    unchanged.compiled.cache_clear()


@pytest.mark.usefixtures("_forgotten")
def test_without_a_compiler_python_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(build, "compile_module_from_src", refuse)
    assert unchanged.compiled() is None
    model = FastTransformer(CASES[12])
    state = model._runtime.state
    state.prove_by(unchanged.compiled())
    assert state.refresh() == state.refresh()
    with torch.no_grad():
        model.final_norm.bias.add_(1.0)
    assert state.refresh() == 2


@pytest.mark.parametrize(
    "facts", [[], (), [(), (), (), ()], [(), (), (), [], 0], [(), (1, ()), (), (), 0]]
)
def test_what_are_no_facts_are_refused(prover: Prover, facts: Any) -> None:
    with pytest.raises(TypeError):
        prover.watch(facts)


def test_what_is_no_tensor_has_changed(prover: Prover) -> None:
    tensor = torch.zeros(2)
    facts: list[Any] = [(), (), (), (tensor, tensor._version, tensor.data_ptr()), 0]
    assert prover.unchanged(facts)
    facts[3] = (nn.Linear(1, 1), 0, 0)
    assert not prover.unchanged(facts)


def test_an_accessor_that_gives_no_natural_number_is_an_error(prover: Prover) -> None:
    """Not a change with an exception left pending, which would surface anywhere."""
    tensor = torch.ones(3)
    for version, address in ((-1, tensor.data_ptr()), (tensor._version, "somewhere")):
        facts = [(), (), (), (tensor, version, address), 0]
        prover.watch(facts)
        with pytest.raises((OverflowError, TypeError)):
            prover.unchanged(facts)

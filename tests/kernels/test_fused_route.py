"""The route ``fused``: what it objects to, what a refusal leads to. No GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from fastlayer import CASES, FastTransformer, MaskKind
from fastlayer.admissions import Admissions
from fastlayer.contract import GIB, Precision, RuntimeContract
from fastlayer.device import Device
from fastlayer.dispatch import decide
from fastlayer.errors import RouteError, RouteRefused
from fastlayer.kernels import proof
from fastlayer.routes import fused, launches, route_named

H200 = Device("cuda", "NVIDIA H200", 140 * GIB, (9, 0), 132, 232_448)
CALL = RuntimeContract(CASES[1], H200, precision=Precision("high", True))


def objections(**changes: object) -> str:
    route = route_named("fused")
    assert route is not None
    return "; ".join(route.objections(replace(CALL, **changes)))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _no_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_REFUSED", {})
    monkeypatch.setattr(proof, "_KNOWN", {})


@pytest.mark.parametrize("case", [case for case, config in CASES.items() if config.d_model <= 128])
@pytest.mark.parametrize("mask", [MaskKind.NONE, MaskKind.FULL, MaskKind.RIGHT_PADDED])
def test_it_serves_every_case_it_was_written_for(case: int, mask: MaskKind) -> None:
    assert objections(config=CASES[case], mask=mask) == ""
    found = launches("fused", replace(CALL, config=CASES[case], mask=mask))
    assert 1 <= len(found) <= 2
    assert all("form" in launch for launch in found)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": Device("cpu", "Some CPU", 16 * GIB)}, "CUDA devices, not on cpu"),
        ({"device": replace(H200, capability=(7, 5))}, "capability (7, 5) is below (8, 0)"),
        ({"mask": MaskKind.IRREGULAR}, "irregular"),
        ({"capturing": True}, "being captured"),
        ({"precision": Precision("highest", False)}, "full precision"),
        ({"dtype": "float16"}, "float16"),
        ({"grad": True}, "autograd"),
        ({"config": CASES[8]}, "d_model = 1024 exceeds 128"),
        ({"config": replace(CASES[1], num_heads=32)}, "head_dim = 4 is below eight"),
        ({"config": CASES[13], "available_bytes": 2**26}, "output and workspace need"),
    ],
)
def test_it_objects_and_says_why(changes: dict[str, object], reason: str) -> None:
    assert reason in objections(**changes)


def test_a_launch_that_cannot_serve_the_shape_is_an_error() -> None:
    model = FastTransformer(CASES[1], route="fused")
    route = route_named("fused")
    assert route is not None
    with pytest.raises(ValueError, match="128 tokens do not fit a tile of 64 rows"):
        route.bind(model._runtime.state, CALL, {"form": "single"})


class TestRefusal:
    """A failed first-use proof, as a model on a GPU meets it."""

    @pytest.fixture(autouse=True)
    def _on_a_gpu_that_fails_its_proof(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr("fastlayer.model.probe", lambda device: H200)
        monkeypatch.setattr(proof, "refusal", lambda claim: "its first-use proof differs")
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        yield
        torch.set_float32_matmul_precision(before)

    def test_binding_raises_and_the_route_objects_from_then_on(self) -> None:
        model = FastTransformer(CASES[7])
        route = route_named("fused")
        assert route is not None
        call = replace(CALL, config=CASES[7])
        with pytest.raises(RouteRefused, match="differs"):
            route.bind(model._runtime.state, call, route.launches(call)[0])
        assert route.objections(call) == ["its first-use proof differs"]
        assert route.objections(CALL) == [], "another shape has its own proof"

    def test_an_explicit_request_raises_with_the_reason(self) -> None:
        config = replace(CASES[7], batch_size=1)
        model = FastTransformer(config, route="fused").eval()
        with torch.no_grad(), pytest.raises(RouteError, match="its first-use proof differs"):
            model(torch.randn(1, 128, 32))

    def test_a_decided_route_falls_back_and_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = replace(CASES[7], batch_size=1)
        model = FastTransformer(config, policy="eligible").eval()
        tried: list[str] = []
        bound = FastTransformer._bound

        def recording(decision: object, runtime: object) -> object:
            tried.append(decision.route)  # type: ignore[attr-defined]
            if decision.route != "fused":  # type: ignore[attr-defined]
                decision = replace(decision, route="dense", launch={})  # type: ignore[type-var]
            return bound(decision, runtime)  # type: ignore[arg-type]

        monkeypatch.setattr(FastTransformer, "_bound", staticmethod(recording))
        with torch.no_grad():
            model(torch.randn(1, 128, 32))
        assert tried == ["fused", "sdpa"]
        assert "rejected: fused: its first-use proof differs" in model.last_decision.explain()  # type: ignore[union-attr]
        later = replace(model.last_decision.contract)  # type: ignore[union-attr]
        assert decide(later, Admissions(), "eligible").route == "sdpa"


def _norm(model: FastTransformer) -> object:
    model.layers[0].norm1.weight[0] = 1e7
    return model


def _hidden(model: FastTransformer) -> object:
    """No weight is beyond float16 here, but the sum of 32 products may be."""
    return model.layers[0].ffn_in.weight.mul_(2e4)


@pytest.mark.parametrize("edit", [_norm, _hidden])
def test_what_is_beyond_float16_runs_float32_attention_and_notes_it(
    edit: Callable[[FastTransformer], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FastTransformer(CASES[7])
    with torch.no_grad():
        edit(model)
    taken: list[str] = []

    def stand_in(name: str, *_: object) -> str:
        taken.append(name)
        return name

    monkeypatch.setattr(fused, "bind_sdpa", stand_in)
    route = route_named("fused")
    assert route is not None
    call = replace(CALL, config=CASES[7])
    route.bind(model._runtime.state, call, route.launches(call)[0])
    assert taken == ["sdpa"]
    assert "leaves float16's range" in model._runtime.state.notes[0]

"""decide() is pure: golden over (case x fake device), and each contract field accounted for."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from fastlayer import (
    CASES,
    Admission,
    Admissions,
    MaskKind,
    Refusal,
    RouteError,
    RuntimeContract,
    UnsafeFallbackError,
    decide,
)
from fastlayer.contract import GIB, Precision
from fastlayer.device import Device
from fastlayer.routes import ROUTE_NAMES, ROUTES, eligible_routes, launches
from fastlayer.routes.batch_stream import BatchStreamRoute
from fastlayer.routes.dense import DenseRoute
from fastlayer.routes.sdpa import SdpaRoute

#: The routes of this file's goldens; others have tests of their own.
PLAIN = (BatchStreamRoute(), SdpaRoute(), DenseRoute())

HIGH = Precision("high", True)
DEVICES = {
    "cpu": Device("cpu", "Some CPU", 16 * GIB),
    "h200": Device("cuda", "NVIDIA H200", 140 * GIB, (9, 0), 132, 232_448),
    "rtx5080": Device("cuda", "NVIDIA GeForce RTX 5080", 16 * GIB, (12, 0), 84, 101_376),
}
ORDINARY = [case for case in CASES if case not in (6, 13, 14)]


def contract(case: int = 1, where: str = "h200", **changes: object) -> RuntimeContract:
    facts = DEVICES[where]
    base = RuntimeContract(
        CASES[case], facts, precision=HIGH, available_bytes=facts.memory_bytes * 15 // 16
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def row(case: int = 1, route: str = "sdpa", device: str = "h200", **launch: object) -> Admission:
    name = DEVICES[device].name
    return Admission(name, HIGH, case, route, launch, f"baselines/{device}.json#{case}")


GOLDEN = {
    **{(case, device): "sdpa" for case in ORDINARY for device in DEVICES},
    **{(13, device): "sdpa" for device in DEVICES},
    **{(6, device): "batch_stream" for device in DEVICES},
    (14, "h200"): "sdpa",
}


@pytest.mark.parametrize(("case", "device"), GOLDEN)
def test_eligible_policy_golden(case, device):
    decision = decide(contract(case, device), Admissions(), "eligible", routes=PLAIN)
    assert decision.route == GOLDEN[case, device]
    assert decision.grounds == "eligible"
    assert decision.admission is None


@pytest.mark.parametrize(("case", "device"), [(14, "cpu"), (14, "rtx5080")])
def test_an_extreme_shape_is_rejected_with_its_bytes(case, device):
    call = contract(case, device)
    for policy in ("strict", "eligible"):
        with pytest.raises(UnsafeFallbackError) as caught:
            decide(call, Admissions(), policy, routes=PLAIN)
        assert caught.value.needed_bytes == call.dense_bytes
        assert f"{call.dense_bytes:,} bytes" in str(caught.value)
        assert "--fastlayer-admit" in str(caught.value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_strict_policy_without_evidence_is_dense_or_an_error(case, device):
    call = contract(case, device)
    if call.dense_fits:
        decision = decide(call, Admissions(), "strict", routes=PLAIN)
        assert (decision.route, decision.grounds) == ("dense", "reference")
        assert "--fastlayer-admit" in decision.explain()
    else:
        with pytest.raises(UnsafeFallbackError):
            decide(call, Admissions(), "strict", routes=PLAIN)


def test_which_cases_dense_cannot_hold():
    for device in DEVICES:
        assert {c for c in CASES if not contract(c, device).dense_fits} == {14}
    small_gpu = replace(DEVICES["rtx5080"], memory_bytes=8 * GIB)
    call = contract(6, "rtx5080", device=small_gpu, available_bytes=8 * GIB)
    with pytest.raises(UnsafeFallbackError, match="not admitted for case 6"):
        decide(call, Admissions(), routes=PLAIN)
    assert decide(call, Admissions(), "eligible", routes=PLAIN).route == "batch_stream"


def test_an_admission_decides_and_is_cited():
    admitted = row(packed_qkv=False, linear="aten", execution="eager")
    decision = decide(contract(), Admissions((admitted,)))
    assert decision.route == "sdpa"
    assert decision.launch == admitted.launch
    assert decision.admission == admitted
    assert "admitted by baselines/h200.json#1" in decision.explain()


def test_an_admitted_reference_is_not_overruled_by_the_eligible_policy():
    decision = decide(contract(), Admissions((row(route="dense"),)), "eligible")
    assert (decision.route, decision.grounds) == ("dense", "admitted")


@pytest.mark.parametrize(
    "other",
    [
        {"device": DEVICES["rtx5080"]},
        {"precision": Precision("highest", False)},
        {"config": CASES[2]},
        {"config": replace(CASES[1], batch_size=63)},
    ],
)
def test_an_admission_covers_its_device_precision_and_case_only(other):
    assert decide(contract(**other), Admissions((row(),)), routes=PLAIN).route == "dense"


def test_an_admitted_route_that_objects_is_not_run():
    decision = decide(contract(autocast="float16"), Admissions((row(),)))
    assert decision.route == "dense"
    assert any("autocast" in reason for reason in dict(decision.rejected)["sdpa"])


def test_refused_launches_are_skipped_under_the_eligible_policy():
    call = contract()
    first, second = launches("sdpa", call)[:2]
    refusal = Refusal(call.device.name, HIGH, 1, "sdpa", first, "slower than dense")
    decision = decide(call, Admissions(refused=(refusal,)), "eligible", routes=PLAIN)
    assert (decision.route, decision.launch) == ("sdpa", second)
    every = tuple(replace(refusal, launch=launch) for launch in launches("sdpa", call))
    decision = decide(call, Admissions(refused=every), "eligible", routes=PLAIN)
    assert decision.route == "dense"
    assert "slower than dense" in decision.explain()


def test_an_explicit_route_never_falls_back():
    with pytest.raises(RouteError) as caught:
        decide(contract(grad=True), Admissions(), route="sdpa")
    assert "inference-only" in str(caught.value)
    assert caught.value.valid == ("dense",)
    with pytest.raises(RouteError, match=r"no route has that name; there are .*dense"):
        decide(contract(), Admissions(), route="warp")


def test_an_explicit_route_needs_no_admission():
    decision = decide(contract(), Admissions(), route="sdpa")
    assert decision.grounds == "requested"
    assert decision.launch == launches("sdpa", contract())[0]
    own = {"packed_qkv": False}
    assert decide(contract(), Admissions(), route="sdpa", launch=own).launch == own


#: What changing one field alone does to the eligible routes of case 1: the routes left, or None
#: where the field is shown not to matter.
FIELD_EFFECTS: dict[str, list[tuple[object, list[str] | None]]] = {
    "config": [(CASES[6], ["batch_stream", "sdpa", "dense"]), (CASES[14], ["sdpa"])],
    "device": [(DEVICES["cpu"], None), (Device("xpu", "An XPU", 16 * GIB), ["dense"])],
    "dtype": [(name, ["dense"]) for name in ("float64", "float16", "bfloat16")],
    "mask": [(kind, None) for kind in MaskKind],
    "precision": [(Precision("highest", False), None)],
    "grad": [(True, ["dense"])],
    "inference": [(True, None)],
    "training": [(True, None)],
    "autocast": [("bfloat16", ["dense"])],
    "deterministic": [(True, ["dense"])],
    "compiling": [(True, None)],
    "capturing": [(True, None)],
    "weights_version": [(7, None)],
    "altered": [("a module is not plain", ["dense"])],
    "available_bytes": [(2**20, []), (40 * 2**20, ["sdpa"])],
    "working_set_bytes": [(2**24, ["batch_stream", "sdpa", "dense"])],
}


def test_every_field_of_the_contract_is_accounted_for():
    assert FIELD_EFFECTS.keys() == {field.name for field in fields(RuntimeContract)}


@pytest.mark.parametrize(
    ("field", "value", "left"),
    [(name, value, left) for name, rows in FIELD_EFFECTS.items() for value, left in rows],
)
def test_one_field_changes_the_eligible_routes_or_does_not_matter(field, value, left):
    base = contract()
    changed = replace(base, **{field: value})
    before = [route.name for route in PLAIN if not route.objections(base)]
    after = [route.name for route in PLAIN if not route.objections(changed)]
    assert after == (before if left is None else left)
    assert hash(changed) is not None
    assert changed != base or value == getattr(base, field)


def test_launches_name_their_values():
    for device in DEVICES:
        for case in CASES:
            for name in eligible_routes(contract(case, device)):
                options = launches(name, contract(case, device))
                assert options, name
                assert len({repr(sorted(o.items())) for o in options}) == len(options)
    assert launches("sdpa", contract())[0]["execution"] == "graph"
    with pytest.raises(KeyError, match="no route is named 'warp'"):
        launches("warp", contract())


def test_slices_suit_the_cache_of_a_cpu_where_the_weights_do():
    def slices(case, device="cpu"):
        return [
            launch["slice"]
            for launch in launches("sdpa", contract(case, device))[1:]
            if "slice" in launch
        ]

    assert slices(1) == slices(5) == slices(11) == [32]
    assert slices(13) == slices(2) == slices(12) == slices(8) == []
    assert slices(1, "h200") == []
    assert "slice" not in launches("sdpa", contract(1, "cpu"))[0]


def test_route_names_are_unique_and_dense_is_last():
    assert len(set(ROUTE_NAMES)) == len(ROUTES)
    assert ROUTE_NAMES[-1] == "dense"
    assert {"batch_stream", "sdpa", "dense"} <= set(ROUTE_NAMES)


def test_decisions_do_not_depend_on_anything_else():
    calls = [contract(case, device) for case in ORDINARY for device in DEVICES]
    once = [decide(call, Admissions(), "eligible") for call in calls]
    again = [decide(call, Admissions(), "eligible") for call in reversed(calls)]
    assert once == again[::-1]

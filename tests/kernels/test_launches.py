"""Launches as data: what is listed can be computed, and what cannot says why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastlayer import CASES, TransformerConfig
from fastlayer.kernels.knobs import Launch, sizes_for
from fastlayer.kernels.launches import CAPABILITIES, COMPILED, GENERAL, MEASURED, candidates

SERVED = [case for case, config in CASES.items() if config.d_model <= 128]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("case", SERVED)
def test_every_served_case_has_one_or_two_able_launches(capability: int, case: int) -> None:
    found = candidates(CASES[case], (capability // 10, capability % 10), 132)
    assert 1 <= len(found) <= 2
    for launch in found:
        assert launch.objections(sizes_for(launch, CASES[case])) == []


def test_wide_cases_have_none() -> None:
    assert candidates(CASES[8], (9, 0), 132) == []
    assert candidates(CASES[14], (9, 0), 132) == []


def test_every_row_gives_its_reason() -> None:
    tables = [COMPILED, *MEASURED.values()]
    rows = [row for table in tables for found in table.values() for row in found]
    assert all(row.reason for row in (*rows, *GENERAL))


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (TransformerConfig(2, 64, 128, 4, 128, 2), "strips"),
        (TransformerConfig(60, 128, 128, 2, 128, 2), "wavefront"),
        (TransformerConfig(70_000, 37, 48, 6, 48, 2), "single"),
        (TransformerConfig(64, 128, 128, 4, 128, 2, False), "single"),
        (TransformerConfig(64, 1000, 128, 4, 128, 2), "layers"),
        (TransformerConfig(4, 300, 64, 1, 64, 2, False), "layers"),
        (TransformerConfig(1, 1024, 128, 1, 128, 2), "wavefront"),
    ],
)
def test_other_shapes_follow_the_regimes(config: TransformerConfig, form: str) -> None:
    first = candidates(config, (9, 0), 132)[0]
    assert first.form == form
    assert first.objections(sizes_for(first, config)) == []


@pytest.mark.parametrize("capability", [90, 120])
def test_the_widest_heads_of_a_long_sequence_fit_shared_memory(capability: int) -> None:
    """Blocks of 128 keys by 128 columns took 245,760 bytes, more than any device has."""
    pytest.importorskip("triton")
    from fastlayer.kernels.compile import compile_step, hollow_program, resources
    from fastlayer.kernels.resources import SHARED_LIMITS

    config = TransformerConfig(1, 1024, 128, 1, 128, 2)
    first, *_ = candidates(config, divmod(capability, 10), 132)
    (step,) = hollow_program(first, config, maximum=True).steps
    assert resources(compile_step(step, capability)).shared <= SHARED_LIMITS[capability]


_STRIPS = Launch("strips", rows=16, chunk=128)
_CASE_2 = CASES[2]


@pytest.mark.parametrize(
    ("launch", "config", "reason"),
    [
        (Launch("single"), CASES[1], "128 tokens do not fit a tile of 64 rows"),
        (Launch("wavefront"), replace(_CASE_2, causal=False), "not causal"),
        (Launch("single", rows=128), CASES[8], "d_model = 1024 exceeds 128"),
        (Launch("single", rows=128), replace(_CASE_2, num_heads=32), "head_dim = 4"),
        (Launch("single", rows=128, chunk=128), replace(_CASE_2, ffn_dim=192), "no multiple"),
        (Launch("single", rows=128, chunk=96), _CASE_2, "chunk = 96 is no power of two"),
        (_STRIPS, replace(_CASE_2, seq_len=129), "129 tokens exceed"),
        (_STRIPS, replace(_CASE_2, num_heads=2), "one for each warp"),
        (replace(_STRIPS, passes=3), _CASE_2, "3 passes"),
        (replace(_STRIPS, chunk=16), _CASE_2, "chunk has 16 columns, fewer than 32"),
        (replace(_STRIPS, rows=64, passes=4), _CASE_2, "fewer than 32"),
    ],
)
def test_objections_name_the_cause(launch: Launch, config: TransformerConfig, reason: str) -> None:
    if (launch.form, launch.passes, launch.rows) == ("strips", 4, 64):
        config = replace(config, d_model=64)
    assert reason in "; ".join(launch.objections(sizes_for(launch, config)))


@pytest.mark.parametrize("row", [row for rows in MEASURED[9, 0].values() for row in rows])
def test_a_launch_survives_its_record(row: object) -> None:
    launch = row.launch  # type: ignore[attr-defined]
    assert Launch.of(launch.as_dict()) == launch


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"form": "spiral"}, "form = 'spiral'"),
        ({"rows": 64}, "needs a form"),
        ({"form": "single", "row": 64}, "no knob 'row'"),
        ({"form": "single", "rows": "64"}, "rows = '64' is not int"),
        ({"form": "single", "rows": True}, "rows = True is not int"),
    ],
)
def test_a_wrong_record_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Launch.of(values)


def test_softmax_keeps_its_maximum_unless_every_layer_is_bounded() -> None:
    config = CASES[1]
    forms = {
        100.0: [Launch("single", rows=128), Launch("strips", rows=16), Launch("wavefront")],
        15.0: [Launch("layers"), Launch("wavefront", keys=64)],
    }
    for safe, launches in forms.items():
        for launch in launches:
            sizes = sizes_for(launch, config)
            assert launch.takes_keys_at_once(sizes) is (safe > 15.0)
            assert not launch.keeps_maximum((10.5, safe - 0.1), sizes)
            assert launch.keeps_maximum((10.5, safe + 0.1), sizes)
            assert launch.keeps_maximum((float("nan"),), sizes)

"""The kernels fit every architecture, and take no more than the committed baseline says.

A plain run compiles a few; ``python -m fastlayer.kernels.resources`` compiles them all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from fastlayer.kernels.compile import Resources
from fastlayer.kernels.launches import CAPABILITIES
from fastlayer.kernels.resources import (
    SHARED_LIMITS,
    Variant,
    complaints,
    main,
    measure,
    read_baseline,
    toolchain,
    variants,
)

BASELINE = Path(__file__).parents[2] / "baselines" / "resources.json"

#: (capability, case): the smallest kernel of each form that has one, for both ends of the range.
QUICK = {(80, 12), (90, 7), (120, 12), (120, 7)}


def quick() -> list[Variant]:
    fused = [v for c in CAPABILITIES for v in variants(c) if isinstance(v, Variant)]
    picked = [variant for variant in fused if (variant.capability, variant.case) in QUICK]
    return [variant for variant in picked if variant.launch.early is False or variant.case == 7]


def test_every_capability_has_its_limit() -> None:
    assert tuple(SHARED_LIMITS) == CAPABILITIES


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_baseline_holds_exactly_the_listed_kernels(capability: int) -> None:
    """For every toolchain it was written with: a kernel added or renamed must be measured."""
    expected = {variant.name for variant in variants(capability)}
    found = [
        {name for name in rows if name.startswith(f"sm_{capability} ")}
        for rows in read_baseline(BASELINE).values()
    ]
    found = [names for names in found if names]
    assert found
    assert all(names == expected for names in found)


def test_every_baseline_row_fits_its_architecture() -> None:
    for rows in read_baseline(BASELINE).values():
        for name, row in rows.items():
            limit = SHARED_LIMITS[int(name.split()[0].removeprefix("sm_"))]
            assert row["shared"] <= limit, name


@pytest.mark.parametrize("variant", quick(), ids=lambda variant: variant.name)
def test_compiles_within_the_baseline(variant: Variant) -> None:
    assert complaints(variant, measure(variant), read_baseline(BASELINE)) == []


class TestComplaints:
    variant = quick()[0]
    tools = toolchain(variant.capability)
    row = {"registers": 255, "stack": 40, "shared": 60_000}  # noqa: RUF012

    def of(self, found: Resources, rows: dict[str, dict[str, int]] | None = None) -> str:
        baseline = {} if rows is None else {self.tools: rows}
        return "; ".join(complaints(self.variant, found, baseline))

    def test_what_it_tolerates(self) -> None:
        rows = {self.variant.name: self.row}
        assert self.of(Resources(255, 40, 60_000), rows) == ""
        assert self.of(Resources(200, 72, 50_000), rows) == ""
        assert self.of(Resources(255, 999, 60_000)) == "", "another toolchain's stack is no measure"

    def test_what_it_does_not(self) -> None:
        rows = {self.variant.name: self.row}
        assert "stack grew from 40 to 73" in self.of(Resources(255, 73, 60_000), rows)
        assert "shared grew from 60,000 to 60,016" in self.of(Resources(255, 40, 60_016), rows)
        limit = SHARED_LIMITS[self.variant.capability]
        assert "a block may use" in self.of(Resources(255, 0, limit + 1))
        assert "has no baseline" in self.of(Resources(255, 0, 0), {})


def test_a_comparison_that_fails_exits_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = iter([10, 20])
    one = quick()[:1]
    monkeypatch.setattr("fastlayer.kernels.resources.variants", lambda capability: iter(one))
    monkeypatch.setattr(
        "fastlayer.kernels.resources.measure", lambda variant: Resources(1, 0, next(taken))
    )
    arguments = ["--baseline", str(tmp_path / "b.json"), "--capability", str(one[0].capability)]
    assert main([*arguments, "--write"]) == 0
    assert main(arguments) == 1
    assert "FAILED: shared grew from 10 to 20 bytes" in capsys.readouterr().out

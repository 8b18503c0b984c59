"""A README's tables and pictures: made from records, byte for byte, and known when out of date."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from makers import DEVICE, case, incorrect, run, unsupported
from test_html import ATTACKS

from pytest_fastlayer.baselines import save
from pytest_fastlayer.cli import main
from pytest_fastlayer.report import figures, markdown

DOCUMENT = "before\n<!-- table:begin r.json -->\nstale\n<!-- table:end -->\nafter\n"


def test_two_pictures_of_the_cases():
    drawn = figures.pictures("r", run({"1": case(), "b": incorrect(), "c": unsupported()}))
    assert list(drawn) == ["r-speedup.svg", "r-budget.svg"]
    speedup = drawn["r-speedup.svg"]
    assert "Speedup: NVIDIA H200, measured 2026-11-30" in speedup
    assert ">case 1<" in speedup
    assert ">b<" not in speedup
    assert ">b<" in drawn["r-budget.svg"]
    assert figures.pictures("r", run({"c": unsupported()})) == {}


def test_pictures_are_the_same_every_time_and_undated():
    record = run({"a": case(), "b": case()})
    first, again = (figures.pictures("r", record) for _ in range(2))
    assert first == again
    for svg in first.values():
        assert not re.search(r"dc:date|<metadata", svg)
        assert "prefers-color-scheme: dark" in svg
        assert "var(--page)" in svg
        assert not re.findall(r"#0[1-7]0[1-7]0[1-7]\b", svg)  # every placeholder became a variable


@pytest.mark.parametrize("attack", ATTACKS)
def test_foreign_text_stays_text(attack):
    record = run({attack: case()}, device=DEVICE.model_copy(update={"name": attack}))
    for svg in figures.pictures("r", record).values():
        tags = {element.tag.rpartition("}")[2] for element in ET.fromstring(svg).iter()}
        assert not tags & {"script", "img", "foreignObject", "a"}


def test_tables_are_put_in_place():
    document = figures.with_tables(DOCUMENT, {"r.json": run()})
    assert document.startswith("before\n<!-- table:begin r.json -->\n\n### fastlayer")
    assert document.endswith("\n<!-- table:end -->\nafter\n")
    assert markdown.table(run()).strip() in document
    assert figures.with_tables(document, {"r.json": run()}) == document
    with pytest.raises(figures.FigureError, match=r"marked for r\.json.*given: other\.json"):
        figures.with_tables(DOCUMENT, {"other.json": run()})


def test_command(tmp_path, capsys):
    save(run(), tmp_path / "r.json")
    (tmp_path / "README.md").write_text(DOCUMENT)
    arguments = [
        "figures",
        str(tmp_path / "r.json"),
        f"--document={tmp_path / 'README.md'}",
        f"--pictures={tmp_path / 'docs'}",
    ]
    assert main([*arguments, "--check"]) == 1
    assert "out of date" in capsys.readouterr().out
    assert not (tmp_path / "docs").exists()
    assert main(arguments) == 0
    assert capsys.readouterr().out.count("wrote ") == 3
    assert main([*arguments, "--check"]) == 0
    assert "3 files are what the records say" in capsys.readouterr().out
    save(run({"a": case(speedup=5)}), tmp_path / "r.json")
    assert main([*arguments, "--check"]) == 1


def test_command_without_a_target_is_a_usage_error(tmp_path, capsys):
    save(run(), tmp_path / "r.json")
    assert main(["figures", str(tmp_path / "r.json")]) == 2
    assert "--document" in capsys.readouterr().err

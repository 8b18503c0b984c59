"""Every command given a bad file: exit code 2, one clean message with file and place, no trace."""

from __future__ import annotations

import json

import pytest
from makers import case, obeyed, run

from pytest_fastlayer.baselines import save
from pytest_fastlayer.cli import FORMATS, main
from pytest_fastlayer.records import Verdict

GOOD = run().to_json()


def edited(**changes: object) -> str:
    return json.dumps(json.loads(GOOD) | changes)


#: name -> (bytes of the file, what the message says)
FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "truncated": (GOOD[:700].encode(), "truncated"),
    "foreign": (b'{"machine_info": {}, "benchmarks": []}', "not a record of pytest-fastlayer"),
    "html": (b"<!doctype html><script>alert(1)</script>", ":1:1: not valid JSON"),
    "binary": (b"\x80\x04\x95pickle", "not UTF-8 text (byte 0)"),
    "deep": (b"[" * 100_000, "nested deeper than 32 levels"),
    "newer": (edited(schema_version=99).encode(), "$.schema_version: 99 is newer"),
    "unit": (edited(surprise="\x1b[2J").encode(), "$.surprise: Extra inputs"),
    "escape": (edited(**{"\x1b]0;x\x07": 1}).encode(), r"$['\x1b]0;x\x07']: Extra inputs"),
    "huge": (GOOD.replace('"pairs": 6', f'"pairs": {10**400}').encode(), ".timing.pairs: Input"),
    "number": (GOOD.replace("0.004", "NaN", 1).encode(), "nan is not a finite number"),
}
COMMANDS = {
    "show": ["show", "{bad}"],
    "explain": ["explain", "{bad}", "a"],
    "report": ["report", "{good}", "{bad}", "-o", "{out}"],
    "compare old": ["compare", "{bad}", "{good}"],
    "compare new": ["compare", "{good}", "{bad}", "--junit", "{out}"],
    "update": ["update", "{bad}", "--baseline", "{out}"],
    "figures": ["figures", "{bad}", "--pictures", "{out}"],
}


def refused(command: str, bad: object, tmp_path, capsys) -> str:
    """What the command said of the file, after checking that it did nothing else."""
    save(run(), tmp_path / "good.json")
    names = {"bad": bad, "good": tmp_path / "good.json", "out": tmp_path / "out"}
    assert main([part.format(**names) for part in COMMANDS[command]]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert not (tmp_path / "out").exists()
    assert said.err.startswith(f"fastlayer-gate: error: {bad}")
    assert all(line.isprintable() for line in said.err.splitlines())
    return said.err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", FILES)
def test_refused_with_file_and_place(kind, command, tmp_path, capsys):
    content, message = FILES[kind]
    bad = tmp_path / "bad.json"
    bad.write_bytes(content)
    assert message in refused(command, bad, tmp_path, capsys)


@pytest.mark.parametrize("name", ["##[error]x", "a ##[stop-commands]b", "c\n::error::d"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_runner_obeys_no_refusal(command, name, tmp_path, capsys):
    """Hosted jobs read files whose names and contents come from a pull request's code."""
    bad = tmp_path / f"{name}.json"
    save(run(), tmp_path / "good.json")
    names = {"bad": bad, "good": tmp_path / "good.json", "out": tmp_path / "out"}
    for content in (None, json.dumps({"schema_version": 1, name: 1}), '{"a": ##[error]'):
        if content is not None:
            bad.write_text(content)
        assert main([part.format(**names) for part in COMMANDS[command]]) in (2, 14)
        said = capsys.readouterr()
        assert not obeyed(said.out + said.err)


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_runner_obeys_no_record(format, tmp_path, capsys, monkeypatch):
    attack = "x ##[error]y\n::error::z"
    hostile = case(Verdict.SLOWER, reason=attack, label=attack, route=attack, nodeid=attack)
    save(run({attack: hostile}, notes=(attack,), commit=attack), tmp_path / "run.json")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    assert main(["show", str(tmp_path / "run.json"), "--format", format]) == 0
    said = capsys.readouterr()
    expected = 1 if format == "github" else 0  # the annotation of the one red case
    assert len(obeyed(said.out + said.err)) == expected
    assert "##[" not in said.out
    assert main(["explain", str(tmp_path / "run.json"), attack]) == 0
    assert not obeyed(capsys.readouterr().out)
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert not any(obeyed(path.read_text()) for path in files)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_hundred_megabytes_are_not_read(command, tmp_path, capsys):
    bad = tmp_path / "bad.json"
    with bad.open("wb") as file:
        file.truncate(100 * 2**20)
    assert "100 MiB is larger than the 16 MiB" in refused(command, bad, tmp_path, capsys)

"""Pinned digests and references loaded from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fastlayer.immutable import (
    DigestError,
    ReferenceLoadError,
    check_pinned,
    digest_file,
    load_reference,
)

SOURCE = """
from dataclasses import dataclass

@dataclass
class Config:
    width: int = 3

class Baseline:
    def __init__(self, config):
        self.config = config

not_a_class = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bench.py"
    path.write_text(SOURCE)
    return path


def test_the_pinned_file_passes_and_a_changed_one_says_how_to_accept_it(file: Path) -> None:
    pinned = digest_file(file)
    assert check_pinned(file, pinned) == pinned
    file.write_text(SOURCE + "\n")
    with pytest.raises(DigestError) as caught:
        check_pinned(file, pinned)
    text = str(caught.value)
    assert pinned in text
    assert digest_file(file) in text
    assert f"git checkout -- {file}" in text
    assert "STALE_BASELINE" in text


@pytest.mark.parametrize("digest", ["", "abc", "G" * 64, "A" * 64])
def test_a_digest_that_is_none_is_refused(file: Path, digest: str) -> None:
    with pytest.raises(DigestError, match="64 lower-case hexadecimal digits"):
        check_pinned(file, digest)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DigestError, match=r"gone\.py does not exist"):
        check_pinned(tmp_path / "gone.py", "0" * 64)


def test_a_class_is_loaded_from_a_file_once(file: Path) -> None:
    found = load_reference(f"{file}:Baseline")
    assert found.__name__ == "Baseline"
    assert load_reference(f"{file}:Baseline") is found
    assert load_reference(f"{file}:Config")().width == 3  # dataclasses look their module up


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("{file}", r"path/to/file\.py:ClassName"),
        ("{file}:", r"path/to/file\.py:ClassName"),
        ("{folder}/data.txt:Baseline", r"path/to/file\.py:ClassName"),
        ("{folder}/none.py:Baseline", "there is no file"),
        ("{file}:Other", "it defines Baseline, Config"),
        ("{file}:not_a_class", "defines no class not_a_class"),
    ],
)
def test_a_spec_that_leads_nowhere_says_why(file: Path, spec: str, words: str) -> None:
    with pytest.raises(ReferenceLoadError, match=words):
        load_reference(spec.format(file=file, folder=file.parent))


def test_errors_of_the_file_itself_pass_through(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise ZeroDivisionError('inside')\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="inside"):
            load_reference(f"{broken}:Baseline")

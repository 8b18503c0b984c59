"""An interruption at any point leaves the old file whole, and no litter."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from makers import case, run

from pytest_fastlayer.baselines import BaselineError, load, save, writing

OLD = run({"old": case()})
NEW = run({f"case {i}": case() for i in range(50)})


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "b.json"
    save(OLD, path)
    return path


def untouched(target) -> bool:
    return load(target) == OLD and os.listdir(target.parent) == [target.name]


def test_creates_folders_and_leaves_only_the_file(tmp_path):
    path = tmp_path / "deep" / "er" / "b.json"
    save(OLD, path)
    assert load(path) == OLD
    assert os.listdir(path.parent) == ["b.json"]


def test_text_is_stable(target):
    first = target.read_bytes()
    save(load(target), target)
    assert target.read_bytes() == first
    assert first.endswith(b"}\n")


@pytest.mark.parametrize("step", ["fsync", "replace", "fdopen"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_failing_step(target, monkeypatch, step, number):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(writing.os, step, fail)
    with pytest.raises(
        BaselineError, match=r"not written.*the old file, if any, is unchanged"
    ) as e:
        save(NEW, target)
    monkeypatch.undo()
    assert ("disk full" in str(e.value)) == (number == errno.ENOSPC)
    assert untouched(target)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, MemoryError])
def test_interrupted(target, monkeypatch, interruption):
    def interrupt(*args):
        raise interruption

    monkeypatch.setattr(writing.os, "replace", interrupt)
    with pytest.raises(interruption):
        save(NEW, target)
    monkeypatch.undo()
    assert untouched(target)


@pytest.mark.parametrize(
    ("text", "said"),
    [(OLD.to_json()[:-40], "would not read back"), (OLD.to_json(), "would read back as another")],
)
def test_what_does_not_read_back_is_not_kept(target, monkeypatch, text, said):
    monkeypatch.setattr(type(NEW), "to_json", lambda self: text)
    with pytest.raises(BaselineError, match=said):
        save(NEW, target)
    monkeypatch.undo()
    assert untouched(target)


def test_killed_in_mid_write(target):
    """kill -9 between the write and the rename: the old file is whole, the litter goes later."""
    script = """
        import os, signal, sys
        from pytest_fastlayer import baselines
        old = baselines.load(sys.argv[1])
        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
        baselines.save(old.model_copy(update={"notes": ("new",)}), sys.argv[1])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(target)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert load(target) == OLD
    (litter,) = set(os.listdir(target.parent)) - {target.name}
    save(NEW, target)
    assert litter in os.listdir(target.parent)  # fresh: it could belong to a living process
    os.utime(target.parent / litter, (0, 0))
    save(NEW, target)
    assert os.listdir(target.parent) == [target.name]


def test_permissions_and_links_are_kept(target, tmp_path):
    target.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(target)
    save(NEW, link)
    assert link.is_symlink()
    assert load(target) == NEW
    assert target.stat().st_mode & 0o777 == 0o640


def test_new_file_follows_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        save(OLD, tmp_path / "n.json")
    finally:
        os.umask(before)
    assert (tmp_path / "n.json").stat().st_mode & 0o777 == 0o640


def test_folder_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BaselineError, match="not written"):
        save(OLD, tmp_path / "file" / "b.json")
    (tmp_path / "d.json").mkdir()
    with pytest.raises(BaselineError, match="not written"):
        save(OLD, tmp_path / "d.json")
    assert sorted(os.listdir(tmp_path)) == ["d.json", "file"]

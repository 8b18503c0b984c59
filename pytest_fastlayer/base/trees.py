"""The base of a run: a revision checked out beside the working tree, or a checkout that is there.

A run has a temporary folder for what its arms write, and for a revision's ``git worktree``. It is
removed by a process of its own, which waits for the run to let go of a pipe: so it goes whether the
run ends, is interrupted, is terminated or is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Variables by which git would look for another repository than the one around a folder, as a
#: hook sets them (``git rev-parse --local-env-vars``).
_GIT_LOCAL = frozenset(
    {
        "GIT_DIR",
        "GIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_OBJECT_DIRECTORY",
        "GIT_ALTERNATE_OBJECT_DIRECTORIES",
        "GIT_COMMON_DIR",
        "GIT_PREFIX",
        "GIT_NAMESPACE",
    }
)
GIT_TIMEOUT_S = 300.0

#: What removes the folder: arguments are it, and of a worktree in it the repository and the path.
#: A killed run's workers may outlive it for a moment, so what they still write is removed too.
_JANITOR = """
import os, shutil, subprocess, sys, time
folder, *worktree = sys.argv[1:]
sys.stdin.read()
def git(*arguments):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(["git", "-C", worktree[0], "worktree", *arguments], **quiet)
if worktree:
    git("remove", "--force", "--force", worktree[1])
for _ in range(100):
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.exists(folder):
        break
    time.sleep(0.1)
if worktree:
    git("prune")
"""


class BaseRevisionError(ValueError):
    """``--fastlayer-base`` leads to no tree that could be measured."""


@dataclass(frozen=True)
class Tree:
    """A checkout: its top folder, and in it the counterpart of pytest's rootdir."""

    top: Path
    root: Path

    def counterpart(self, path: Path, other: Tree) -> Path | None:
        """Where ``path`` of this tree lies in the other; None for a path outside this tree."""
        for mine, theirs in ((self.root, other.root), (self.top, other.top)):
            if path.is_relative_to(mine):
                return theirs / path.relative_to(mine)
        return None


@dataclass(frozen=True)
class Base:
    """What ``--fastlayer-base`` named: ``rev`` as given, its commit, and both trees."""

    rev: str
    commit: str | None
    head: Tree
    tree: Tree
    scratch: Path  #: the run's folder, for what its arms write

    def dump(self) -> dict[str, str | None]:
        """As plain text, for another process of the same machine."""
        return {
            "rev": self.rev,
            "commit": self.commit,
            "scratch": str(self.scratch),
            **{f"head_{name}": str(getattr(self.head, name)) for name in ("top", "root")},
            **{f"tree_{name}": str(getattr(self.tree, name)) for name in ("top", "root")},
        }

    @classmethod
    def load(cls, dumped: Mapping[str, Any]) -> Base:
        head, tree = (
            Tree(Path(dumped[f"{side}_top"]), Path(dumped[f"{side}_root"]))
            for side in ("head", "tree")
        )
        return cls(dumped["rev"], dumped["commit"], head, tree, Path(dumped["scratch"]))


def is_environment(path: Path) -> bool:
    """Inside what is installed, as opposed to what a project's tree holds as its own."""
    installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return installed or path.is_relative_to(Path(sys.prefix).resolve() / "lib")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _GIT_LOCAL}


def _git(folder: Path, *arguments: str) -> str:
    """Output of a git command in ``folder``. Raises OSError or subprocess.SubprocessError."""
    return subprocess.run(
        ("git", "-C", str(folder), *arguments),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=GIT_TIMEOUT_S,
        check=True,
        env=_environment(),
    ).stdout.strip()


def _complaint(folder: Path) -> str:
    """Why git sees no repository around ``folder``, in its own words."""
    try:
        _git(folder, "rev-parse", "--show-toplevel")
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        return said.splitlines()[0] if said else "nothing"
    return "nothing"


def _try_git(folder: Path, *arguments: str) -> str | None:
    try:
        return _git(folder, *arguments) or None
    except (OSError, subprocess.SubprocessError):
        return None


class Checkout:
    """The base of a run, and the run's folder, which may hold its worktree. Close it at the end."""

    def __init__(self, rev: str, rootpath: Path, directory: Path) -> None:
        """Find ``rev`` from pytest's ``rootpath``; a path is taken from ``directory``.

        A revision comes first, as git itself reads an ambiguous word; ``./name`` is always a path.

        Raises:
            BaseRevisionError: no revision and no folder of this name, or git could not check it
                out; the message says what was looked for.
        """
        self._janitor: subprocess.Popen[bytes] | None = None
        rootpath = rootpath.resolve()
        top_text = _try_git(rootpath, "rev-parse", "--show-toplevel")
        top = Path(top_text).resolve() if top_text else rootpath
        head = Tree(top, rootpath)
        commit = None
        if top_text and not rev.startswith(("-", "./", "../", "/")):
            commit = _try_git(top, "rev-parse", "--verify", "--quiet", f"{rev}^{{commit}}")
        if commit is not None:
            folder = self._add(top, rev, commit)
        else:
            folder = directory / rev
            if rev.startswith("-") or not rev.strip() or not folder.is_dir():
                raise BaseRevisionError(_not_found(rev, rootpath, is_repository=bool(top_text)))
            commit = _try_git(folder, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
            self._employ(_scratch())
        self.base = Base(rev, commit, head, _tree(folder.resolve(), head), self._folder)

    def _employ(self, folder: Path, *worktree: Path) -> None:
        """Start what removes ``folder``: before there is much in it, so that it always goes."""
        self._folder = folder
        self._janitor = subprocess.Popen(
            (sys.executable, "-I", "-S", "-c", _JANITOR, *map(str, (folder, *worktree))),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # what interrupts or stops the run's group passes it by
        )

    def _add(self, top: Path, rev: str, commit: str) -> Path:
        folder = _scratch()
        tree = folder / f"fastlayer-base-{commit[:10]}"
        self._employ(folder, top, tree)
        try:
            # No hook of the repository runs for a checkout that nobody works in.
            hooks = ("-c", "core.hooksPath=/dev/null")
            _git(top, *hooks, "worktree", "add", "--detach", "--quiet", str(tree), commit)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError | subprocess.SubprocessError):
                raise
            said = getattr(error, "stderr", None) or str(error)
            raise BaseRevisionError(
                f"--fastlayer-base={rev}: git could not check out {commit[:10]}: {said.strip()}"
            ) from None
        return tree

    def close(self) -> None:
        """Remove the run's folder, and wait until it is gone."""
        janitor, self._janitor = self._janitor, None
        if janitor is None:
            return
        assert janitor.stdin is not None
        janitor.stdin.close()
        janitor.wait(GIT_TIMEOUT_S)


def _scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="fastlayer-base-"))


def _tree(folder: Path, head: Tree) -> Tree:
    """A checkout of the whole repository, or of the folder that pytest runs from."""
    root = folder / head.root.relative_to(head.top)
    return Tree(folder, root if root.is_dir() else folder)


def _not_found(rev: str, rootpath: Path, *, is_repository: bool) -> str:
    if is_repository:
        return (
            f"--fastlayer-base={rev}: the repository at {rootpath} has no such revision, and there "
            "is no such folder; give a commit, branch or tag that is present (a shallow clone "
            "lacks most: fetch it, or check out with full depth), or the path of a checkout"
        )
    return (
        f"--fastlayer-base={rev}: git sees no repository at {rootpath} (it said: "
        f"{_complaint(rootpath)}), and there is no such folder; run inside a repository, or give "
        "the path of a checkout of the base"
    )

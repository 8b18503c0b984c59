"""Processes of arms: what each end says when the other fails, and where its modules come from."""

from __future__ import annotations

import enum
import json
import os
import select
import signal
import socket
import subprocess
import sys
import types
from contextlib import suppress
from itertools import pairwise

import numpy
import pytest
import torch
from repository import build, git

from pytest_fastlayer import accuracy
from pytest_fastlayer.base import arms, client, origin, protocol
from pytest_fastlayer.base.client import ArmError, Child, Request
from pytest_fastlayer.base.protocol import Channel, Closed
from pytest_fastlayer.base.trees import Base, BaseRevisionError, Checkout, Tree


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return build(tmp_path_factory.mktemp("client") / "repo")


@pytest.fixture(scope="module")
def checkout(repository):
    found = Checkout("HEAD~1", repository, repository)
    yield found
    found.close()


# -- processes --------------------------------------------------------------------------------


@pytest.fixture
def serve(checkout, tmp_path):
    children = []

    def start(case, nodeid=None, **options):
        nodeid = nodeid or f"test_pairs.py::test_pair[{case}]"
        request = Request(checkout.base, nodeid, ("--fastlayer-seeds=2",), None, 60.0)
        tree = checkout.base.tree
        child = Child(request, tree, case=case, device="cpu", log=tmp_path / "log", **options)
        children.append(child)
        return child

    yield start
    for child in children:
        child.close(0)


def test_a_crash_while_timed_is_told_with_its_last_lines(serve, tmp_path):
    child = serve("crash")
    facts = child.ready()
    assert facts["clock"] == "cpu_clock"
    assert facts["foreign"] == []
    # Its first call forks: the copy has no say.
    output = child.ask("output", arm="candidate", seed=1, file=str(tmp_path / "output.pt"))
    assert output["overwrote"] == []
    child.ask("renew", seed=1)
    child.ask("block", arm="reference", forwards=3, cold=False)
    # Its second leaves a helper behind, which lives for as long as it is let.
    with pytest.raises(ArmError, match="ended with exit code 7") as caught:
        child.ask("block", arm="candidate", forwards=3, cold=False)
    assert caught.value.status == "crashed"
    assert "an illegal memory access" in caught.value.tail[-1]


class Told(Child):
    """A child of which only the events and the output are known."""

    def __init__(self, *events, whose="", is_ready=False, tail=()):
        self._said, self._whose, self._is_ready, self._tail = dict(events), whose, is_ready, tail

    def tail(self):
        return self._tail


@pytest.mark.parametrize(
    ("events", "end", "status", "reason"),
    [
        ([], {"code": 4}, "missing", "it has no such test"),
        ([], {"code": 5}, "missing", "it has no such test"),
        ([], {"code": 0, "others": ["b"]}, "missing", "no pair of this name; it makes b"),
        ([("skipped", "no GPU")], {"code": 0}, "missing", "its test was skipped: no GPU"),
        ([("unsupported", "10 TB"), ("skipped", "")], {"code": 0}, "unsupported", "10 TB"),
        ([("failed", "x\nE   KeyError: 3\nb.py:1")], {"code": 1}, "failed", "made: KeyError: 3"),
        ([("uncollected", "E   NameError: n")], {"code": 2}, "import_error", "NameError: n"),
    ],
)
def test_why_a_test_served_no_pair(events, end, status, reason):
    child = Told(*events, tail=("ERROR: not found: test_pairs.py::test_a",))
    error = child._unserved({"others": []} | end)
    assert error.status == status
    assert error.reason.endswith(reason)
    own = Told(whose="this tree's own head").error(error.status, "r")
    assert own.status == "failed"
    assert own.reason == "the process of this tree's own head: r"


#: Ends of the output of a pytest that broke off, as it is read.
USAGE = (
    "ERROR: usage: child.py [options] [file_or_dir] [file_or_dir] [...]",
    "child.py: error: unrecognized arguments: --gone",
    "inifile: /base/pytest.ini",
    "rootdir: /base",
)
CONFTEST = (
    "ImportError while loading conftest '/base/conftest.py'.",
    "conftest.py:1: in <module>",
    "E   ImportError: libgone.so: not found",
)
INTERRUPT = (
    "!!!!!!!! KeyboardInterrupt !!!!!!!!",
    "/base/test_pairs.py:3: KeyboardInterrupt",
    "(to show a full traceback on KeyboardInterrupt use --full-trace)",
    "no tests ran in 0.10s",
)
INTERNAL = ("INTERNALERROR> raise ValueError(3)", "INTERNALERROR> ValueError: 3", "no tests ran")


@pytest.mark.parametrize(
    ("tail", "code", "reason"),
    [
        (USAGE, 4, "pytest could not start in its tree: unrecognized arguments: --gone"),
        (CONFTEST, 4, "pytest could not start in its tree: ImportError: libgone.so: not found"),
        (INTERRUPT, 2, "it interrupted its test: KeyboardInterrupt"),
        (INTERNAL, 3, "pytest broke off in its tree: ValueError: 3"),
        ((), 3, "pytest broke off in its tree: no output"),
    ],
)
def test_a_pytest_that_breaks_off_is_told_in_its_own_words(tail, code, reason):
    error = Told(tail=tail)._unserved({"code": code, "others": []})
    assert (error.status, error.reason, error.tail) == ("failed", reason, tail)


def test_a_pair_that_was_made_is_not_called_unmade():
    child = Told(("failed", "E   Failed: timed out"), is_ready=True)
    reason = child._unserved({"code": 1, "others": []}).reason
    assert reason == "its test failed while its pair was served: Failed: timed out"


class Faked(Child):
    """A child whose process is a ``sleep``, and what it says a list of raw lines."""

    def __init__(self, *lines, alive=True):
        self.timeout_s, self._whose, self._said, self._asked = 30.0, "", {}, 0
        mine, self.theirs = socket.socketpair()
        self._channel = Channel(mine)
        self._process = types.SimpleNamespace(
            poll=lambda: None if alive else -6, wait=lambda timeout: -6
        )
        self.theirs.sendall(b"".join(line + b"\n" for line in lines))

    def tail(self):
        return ("last words",)


def line(event, **facts):
    return json.dumps({"event": event} | facts).encode()


PAIR = {
    "inputs": "0f",
    "clock": "cpu_clock",
    "resolution_s": 1e-9,
    "settle_s": 0.0,
    "foreign": [],
}
BLOCK = {"id": 1, "seconds": 1.0, "wall_s": 1.0, "tail_s": 0.0, "replaced": []}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"[]", "it sent [], which is no message"),
        (b"{}", "it sent {}, which is no message"),
        (b"CUDA error", "it sent b'CUDA error', which is no message"),
        (b"\xff", "which is no message"),
        (b"[" * 100_000, "which is no message"),
        (line("answer", **BLOCK), "it sent 'answer' where 'pair' was due"),
        (line("pair"), "its pair lacks 'inputs'"),
        (line("pair", **PAIR | {"settle_s": float("nan")}), "its pair says settle_s = nan"),
        (line("pair", **PAIR | {"foreign": [3]}), "its pair says foreign = [3]"),
        (line("end", code="0", others=[]), "its end says code = '0'"),
        (line("failed", text=None), "its failed says text = None"),
    ],
)
def test_nonsense_in_place_of_a_pair_is_a_failure_of_the_base(said, reason):
    with pytest.raises(ArmError) as caught:
        Faked(said).ready()
    assert caught.value.status == "failed"
    assert caught.value.reason.startswith("its process talks nonsense to the run: ")
    assert caught.value.reason.endswith(reason)
    assert caught.value.tail == ("last words",)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (line("pair", **PAIR), "it sent 'pair' where 'answer' was due"),
        (line("answer"), "its answer lacks 'id'"),
        (line("answer", **BLOCK | {"id": 7}), "it answered more than once"),
        (line("answer", id=1), "its answer (block) lacks 'seconds'"),
        (line("answer", **BLOCK | {"seconds": -1}), "its answer (block) says seconds = -1"),
        (line("answer", **BLOCK | {"tail_s": 10**400}), "says tail_s = 1000"),
    ],
)
def test_nonsense_in_place_of_an_answer_is_a_failure_of_the_base(said, reason):
    child = Faked(line("pair", **PAIR), said)
    assert child.ready()["clock"] == "cpu_clock"
    with pytest.raises(ArmError) as caught:
        child.ask("block", arm="candidate", forwards=1, cold=False)
    assert caught.value.status == "failed"
    assert reason in caught.value.reason


def test_a_process_is_gone_though_a_helper_of_it_holds_the_pipe(monkeypatch):
    monkeypatch.setattr(protocol, "WATCH_S", 0.01)
    child = Faked(line("pair", **PAIR), line("answer", **BLOCK), alive=False)
    child.ready()
    assert child.ask("block", arm="candidate")["seconds"] == 1  # said before it died
    with pytest.raises(ArmError, match="its process ended by SIGABRT") as caught:
        child.ask("block", arm="candidate")
    assert caught.value.status == "crashed"
    assert child.theirs.fileno() > 0


def test_a_process_that_says_anything_but_an_answer_is_timed_out():
    child = Faked(line("pair", **PAIR), *20 * [line("failed", text="not yet")])
    child._whose = "this tree's own head"
    child.ready()
    child.timeout_s = 0.01
    with pytest.raises(ArmError, match=r"own head: it did not answer \(block\) within") as caught:
        child.ask("block", arm="candidate", forwards=3, cold=False)
    assert caught.value.status == "timeout"


class Level(enum.IntEnum):
    LOW = 3


class Odd:
    """Prints its address."""


def test_an_output_of_numbers_of_their_own_types_travels(tmp_path):
    output = {
        "loss": numpy.float64(0.5),
        "half": numpy.float16(0.5),
        "level": Level.LOW,
        "flag": numpy.bool_(True),
        "phase": numpy.complex128(1j),
        "name": numpy.str_("a"),
        "odd": Odd(),
        "weight": torch.nn.Parameter(torch.ones(2)),
        "part": torch.arange(1000)[:3],
        "none": None,
    }
    file = tmp_path / "base.pt"
    torch.save(arms.portable(output), file)
    assert file.stat().st_size < 4000
    found = torch.load(file, weights_only=True)
    plain = {path[8:-2]: value for path, value in found.items()}
    assert [*map(type, plain.values())][:7] == [float, float, int, bool, complex, str, str]
    assert plain["level"] == 3
    assert " at 0x" not in plain["odd"]
    assert accuracy.compare(found, arms.flattened(output)).passed


def test_a_channel_tells_an_end_from_a_wait():
    mine, theirs = socket.socketpair()
    channel = Channel(mine)
    with pytest.raises(TimeoutError):
        channel.receive(0.01)
    theirs.sendall(b'{"event": "a"}\n{"event"')
    assert channel.receive(1) == {"event": "a"}
    theirs.close()
    with pytest.raises(Closed):
        channel.receive(1)
    with pytest.raises(Closed):
        channel.send({"do": "stop"})


def test_what_a_served_test_needs_of_the_run_is_passed_on(pytester):
    config = pytester.parseconfig("-p", "pytester", "-o", "xfail_strict=1", "--import-mode=append")
    found = client.passed_on(config)
    assert found[0] == "--import-mode=append"
    assert ("-o", "xfail_strict=1") in pairwise(found)
    assert ("-p", "pytester") in pairwise(found)
    assert "-n0" in found
    assert "--timeout=0" not in found


# -- trees ------------------------------------------------------------------------------------


def test_a_revision_is_checked_out_beside_the_tree(checkout, repository):
    base = checkout.base
    assert base.commit == git(repository, "rev-parse", "HEAD~1")
    assert base.head == Tree(repository, repository)
    assert (base.tree.root / "pytest_fastlayer").is_dir()
    assert Base.load(json.loads(json.dumps(base.dump()))) == base


def test_a_path_is_a_base_without_any_repository(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    found = Checkout("../there", here, here)
    assert (found.base.commit, found.base.tree) == (None, Tree(there, there))
    assert found.base.scratch.is_dir()
    found.close()
    assert not found.base.scratch.exists()


def test_a_rootdir_below_the_top_has_its_counterpart(repository, tmp_path):
    below = repository / "package"
    below.mkdir(exist_ok=True)
    (tmp_path / "package").mkdir()
    found = Checkout(str(tmp_path), below, below)
    assert found.base.tree == Tree(tmp_path, tmp_path / "package")
    assert found.base.head == Tree(repository, below)
    found.close()


@pytest.mark.parametrize("rev", ["gone", "--all", "", "HEAD~9", "./gone"])
def test_what_is_no_base(rev, repository):
    with pytest.raises(BaseRevisionError, match="--fastlayer-base="):
        Checkout(rev, repository, repository)
    assert len(git(repository, "worktree", "list").splitlines()) <= 2


def test_a_hook_that_points_git_elsewhere_is_not_followed(repository, monkeypatch, tmp_path):
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    found = Checkout("HEAD", repository, repository)
    tree = found.base.tree.top
    assert (tree / "kernels.py").exists()
    found.close()
    assert not tree.exists()


@pytest.mark.parametrize(("rev", "how"), [("HEAD", signal.SIGKILL), (".", signal.SIGTERM)])
def test_a_killed_run_leaves_nothing(repository, tmp_path, rev, how):
    """Neither the worktree nor what an arm of it wrote."""
    script = (
        "import signal; from pathlib import Path; from pytest_fastlayer.base.trees import Checkout;"
        f"c = Checkout({rev!r}, Path.cwd(), Path.cwd()); Path(c.base.scratch, 'arms').mkdir();"
        "print(c._janitor.pid, flush=True); signal.pause()"
    )
    process = subprocess.Popen(
        (sys.executable, "-c", script),
        cwd=repository,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    janitor = int(process.stdout.readline())
    (folder,) = tmp_path.glob("fastlayer-*")
    assert (folder / "arms").is_dir()
    assert len([*folder.glob("fastlayer-base-*/kernels.py")]) == (rev == "HEAD")
    process.send_signal(how)
    process.wait()
    # It is nobody's child any more, and says nothing: so wait for the process itself.
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(janitor)], [], [])
    assert not list(tmp_path.glob("fastlayer-*"))


# -- modules ----------------------------------------------------------------------------------


def trees(tmp_path):
    head, base = (Tree(tmp_path / name, tmp_path / name) for name in ("head", "base"))
    for tree in (head, base):
        (tree.top / "src").mkdir(parents=True)
        (tree.top / "python").mkdir()
    return head, base


def test_every_entry_of_the_path_inside_the_tree_has_its_counterpart(tmp_path, monkeypatch):
    head, base = trees(tmp_path)
    environment = head.top / ".venv" / "lib" / "python3" / "site-packages"
    entries = [str(head.top / "python"), "/usr/lib/python3", str(environment), str(head.top)]
    monkeypatch.setattr(sys, "path", entries)
    first, without = client._search_path(head, base)
    assert first == [str(base.top), str(base.top / "src"), str(base.top / "python")]
    assert without == [str(head.top / "python"), str(head.top)]
    assert client._search_path(head, head)[1] == []


class Pair:
    inputs = staticmethod(lambda seed: ())

    def __init__(self, candidate):
        self.candidate = candidate


def module(monkeypatch, name, file):
    made = types.ModuleType(name)
    made.__file__ = str(file)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def test_a_module_of_the_head_in_the_base_is_found(tmp_path, monkeypatch):
    head, base = trees(tmp_path)
    module(monkeypatch, "stranger_ops", head.top / "src" / "stranger_ops.py")
    module(monkeypatch, "stranger_own", base.top / "src" / "stranger_own.py")
    monkeypatch.setattr(origin, "_OWN", head.top / "pytest_fastlayer")
    for name in ("pytest_fastlayer.beside", "__main__"):
        module(monkeypatch, name, head.top / "pytest_fastlayer" / "base" / "child.py")
    found = origin.foreign(Pair(len), base.top, head.top)
    assert found == [f"stranger_ops ({head.top / 'src' / 'stranger_ops.py'})"]


def test_the_project_installed_for_good_is_found(tmp_path, monkeypatch):
    head, base = trees(tmp_path)
    (base.top / "pyproject.toml").write_text('[project]\nname = "Stranger_Kit"\n')
    made = module(monkeypatch, "stranger", tmp_path / "site-packages" / "stranger" / "__init__.py")
    exec("def candidate(x): return x", made.__dict__)
    names = {"stranger": ["stranger-kit"]}
    monkeypatch.setattr(origin.metadata, "packages_distributions", lambda: names)
    (found,) = origin.foreign(Pair(made.candidate), base.top, head.top)
    assert found.startswith("stranger (")
    names["stranger"] = ["another"]
    assert origin.foreign(Pair(made.candidate), base.top, head.top) == []

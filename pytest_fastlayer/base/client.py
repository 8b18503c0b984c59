"""The run's end: start the process of an arm, command it, and say what went wrong with it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

import pytest

import pytest_fastlayer
from pytest_fastlayer.base.protocol import (
    ANSWERS,
    Channel,
    Closed,
    Unexpected,
    check_fields,
    check_message,
)
from pytest_fastlayer.base.trees import Base, Tree, is_environment
from pytest_fastlayer.clocks import BlockTime
from pytest_fastlayer.records import BaseStatus
from pytest_fastlayer.report import text

#: Lines of a process's output that are kept when it fails.
TAIL_LINES = 12
#: Seconds that a process may take to end by itself once it is told to.
FAREWELL_S = 10.0
#: What keeps other plugins from taking the served test out of our hands, where they are in use.
_NEUTRAL = {
    "xdist": "-n0",
    "timeout": "--timeout=0",
    "rerunfailures": "--reruns=0",
    "pytest_cov": "--no-cov",
}

#: What became of a test of which nothing else was told, by pytest's exit code.
_BROKEN_OFF: dict[int, str] = {
    pytest.ExitCode.USAGE_ERROR: "pytest could not start in its tree",
    pytest.ExitCode.INTERRUPTED: "it interrupted its test",
    pytest.ExitCode.INTERNAL_ERROR: "pytest broke off in its tree",
}
#: How pytest, its parser of arguments and its tracebacks begin the line that names an error.
_COMPLAINT = re.compile(
    r"^E +|^[\w.]+: error: |^ERROR: (?!usage: )|^INTERNALERROR> (?=[\w.]+: )"
    r"|^[^ ]+:\d+: (?=KeyboardInterrupt$)|^mainloop caught unexpected "
)
#: How pytest says that there is no such test.
_NOT_FOUND = ("ERROR: not found: ", "ERROR: file or directory not found: ")


class ArmError(Exception):
    """An arm's process could not serve. ``status`` is what a base's record says then."""

    def __init__(self, status: BaseStatus, reason: str, tail: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.status: BaseStatus = status
        self.reason = reason
        self.tail = tuple(tail)


class DishonestArmError(Exception):
    """The candidate of this tree does not compute, where it is served, what its time is for."""


@dataclass(frozen=True)
class Request:
    """One test whose base is wanted: everything but the pair itself."""

    base: Base
    nodeid: str
    arguments: tuple[str, ...]  #: of pytest, for the processes of all arms alike
    inipath: Path | None
    timeout_s: float

    def job(self, tree: Tree, case: str, device: str) -> dict[str, Any]:
        """What the process of an arm in ``tree`` is told; see ``child.main``."""
        head = self.base.head
        own = tree == head
        path, without = _search_path(head, tree)
        ini: list[str] = []
        if self.inipath is not None:
            there = head.counterpart(self.inipath, tree) or self.inipath
            ini = ["-c", str(there)] if there.is_file() else []
        return {
            "gate": str(Path(pytest_fastlayer.__file__).parents[1]),
            "path": path,
            "without": without,
            "case": case,
            "device": device,
            "tree": str(tree.top),
            "other": None if own else str(head.top),
            "arguments": [
                *ini,
                f"--rootdir={tree.root}",
                *("-p", "no:fastlayer", "-p", "pytest_fastlayer.plugin"),
                *("-p", "no:cacheprovider", "-s", "-q", "--tb=short", "--color=no"),
                "--assert=plain",  # nobody rewrites what is only imported to be called
                "--fastlayer-bench",
                f"--fastlayer-device={device.partition(':')[0]}",
                *self.arguments,
                self.nodeid,
            ],
        }


def passed_on(config: pytest.Config) -> tuple[str, ...]:
    """Arguments of this run that a served test needs too, and those that keep it in our hands.

    What decides how its modules are found and which plugins it has: options of other plugins, or
    of a conftest, are not known well enough to be passed on.
    """
    option = config.option
    overridden = [("-o", one) for one in option.override_ini or ()]
    plugins = [("-p", name) for name in option.plugins or ()]
    return (
        f"--import-mode={option.importmode}",
        *(argument for pair in (*overridden, *plugins) for argument in pair),
        *(quiet for name, quiet in _NEUTRAL.items() if config.pluginmanager.hasplugin(name)),
    )


def _search_path(head: Tree, tree: Tree) -> tuple[list[str], list[str]]:
    """Folders of ``tree`` to import from first, and those of the head to leave out.

    Every entry of this process's path inside the head's tree has a counterpart: a flat or ``src``
    layout, an editable install's ``.pth``, ``PYTHONPATH``. An environment that lies inside the
    tree is none of the project's code and stays.
    """
    first: list[Path] = [tree.root, tree.root / "src"]
    without: list[Path] = []
    for entry in sys.path:
        folder = Path(entry or os.curdir).resolve()
        counterpart = head.counterpart(folder, tree)
        if counterpart is not None and not is_environment(folder):
            first.append(counterpart)
            without.append(folder)
    path = [folder for folder in dict.fromkeys(first) if folder.is_dir()]
    return [*map(str, path)], [str(folder) for folder in without if folder not in path]


def _environment() -> dict[str, str]:
    """This process's, without what says that it is a worker, or in the middle of a test."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_XDIST_", "PYTEST_CURRENT_TEST"))
    }


class Child:
    """The process of one arm. A context manager: at its end the process is gone."""

    def __init__(
        self, request: Request, tree: Tree, *, case: str, device: str, log: Path, whose: str = ""
    ) -> None:
        """Start it. ``whose`` names an arm of this tree, whose errors are not the base's."""
        self.timeout_s = request.timeout_s
        self._whose = whose
        self._log = log
        self._said: dict[str, str] = {}
        self._is_ready = False
        self._asked = 0
        mine, theirs = socket.socketpair()
        job = request.job(tree, case, device) | {"end": theirs.fileno()}
        script = Path(__file__).with_name("child.py")
        with log.open("wb") as output, theirs:
            self._process = subprocess.Popen(
                (sys.executable, str(script), json.dumps(job)),
                cwd=tree.root,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # to be ended with whatever it starts
            )
        self._channel = Channel(mine)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(patience_s=FAREWELL_S if error is None and self._is_ready else 0.0)

    def close(self, patience_s: float = FAREWELL_S) -> None:
        """End the process, by force if it takes longer, together with what it started."""
        with suppress(Closed):
            self._channel.send({"do": "stop"})
        self._channel.close()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def error(self, status: BaseStatus, reason: str, tail: Sequence[str] = ()) -> ArmError:
        """What went wrong here, as the base's record is to say it."""
        if not self._whose:
            return ArmError(status, reason, tail)
        own: BaseStatus = status if status in ("crashed", "timeout") else "failed"
        return ArmError(own, f"the process of {self._whose}: {reason}", tail)

    def accusation(self, arm: str, status: BaseStatus, reason: str) -> Exception:
        """What a timed arm did that its figure cannot stand on: of this tree's candidate or not.

        A base that does it has no figure; a head that does it is dishonest.
        """
        if self._whose and arm == "candidate":
            return DishonestArmError(f"in the process of {self._whose}: {reason}")
        return self.error(status, reason)

    def ready(self) -> dict[str, Any]:
        """What the pair says of itself once the test has made it. Raises ArmError."""
        facts = self._await("pair", "make its pair")
        self._is_ready = True
        return facts

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        """The answer to an order. Raises ArmError, also when the answer is an error."""
        self._asked += 1
        try:
            self._channel.send({"do": do, "id": self._asked} | order)
        except Closed:
            raise self._ended() from None
        answer = self._await("answer", f"answer ({do})")
        if isinstance(answer.get("error"), str):
            raise self.error("failed", text.plain(answer["error"], 300), self.tail())
        try:
            if answer["id"] != self._asked:
                raise Unexpected("it answered more than once")
            return check_fields(answer, ANSWERS[do], f"answer ({do})")
        except Unexpected as error:
            raise self._senseless(error) from None

    def _await(self, wanted: Literal["pair", "answer"], doing: str) -> dict[str, Any]:
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                left = deadline - time.monotonic()
                message = self._channel.receive(left, lambda: self._process.poll() is None)
                message = check_message(message, wanted)
            except TimeoutError:
                raise self.error(
                    "timeout",
                    f"it did not {doing} within {self.timeout_s:g} s (--fastlayer-base-timeout)",
                    self.tail(),
                ) from None
            except Closed:
                raise self._ended() from None
            except Unexpected as error:
                raise self._senseless(error) from None
            if message["event"] == wanted:
                return message
            if message["event"] == "end":
                raise self._unserved(message)
            self._said[message["event"]] = message["text"]

    def _senseless(self, error: Unexpected) -> ArmError:
        """The process does not keep to the protocol: whatever it says is worth nothing."""
        reason = f"its process talks nonsense to the run: {text.plain(error, 200)}"
        return self.error("failed", reason, self.tail())

    def _ended(self) -> ArmError:
        """The pipe is closed: by a process that ended before it could say why."""
        try:
            code = self._process.wait(FAREWELL_S)
        except subprocess.TimeoutExpired:
            return self.error("crashed", "its process closed the pipe", self.tail())
        how = f"with exit code {code}"
        if code < 0:
            names = {one.value: one.name for one in signal.Signals}
            how = f"by {names.get(-code, f'signal {-code}')}"
        return self.error("crashed", f"its process ended {how}", self.tail())

    def _unserved(self, end: dict[str, Any]) -> ArmError:
        """The test is over without the pair: why?"""
        said = self._said
        if "unsupported" in said:
            return self.error("unsupported", text.plain(said["unsupported"], 300))
        if "uncollected" in said:
            reason = f"its test module does not import: {last_line(said['uncollected'])}"
            return self.error("import_error", reason, _lines(said["uncollected"]))
        if "failed" in said:
            when = "while its pair was served" if self._is_ready else "before the pair was made"
            reason = f"its test failed {when}: {last_line(said['failed'])}"
            return self.error("failed", reason, _lines(said["failed"]))
        if "skipped" in said:
            return self.error(
                "missing", f"its test was skipped: {text.plain(said['skipped'], 200)}"
            )
        code, tail = end["code"], self.tail()
        is_not_found = any(line.startswith(_NOT_FOUND) for line in tail)
        has_no_test = code == pytest.ExitCode.NO_TESTS_COLLECTED or (
            code == pytest.ExitCode.USAGE_ERROR and is_not_found
        )
        if has_no_test:
            return self.error("missing", "it has no such test", tail)
        if code in _BROKEN_OFF:
            return self.error("failed", f"{_BROKEN_OFF[code]}: {complaint(tail)}", tail)
        made = f"; it makes {text.listing(end['others'])}" if end["others"] else ""
        return self.error("missing", f"its test makes no pair of this name{made}", tail)

    def tail(self) -> tuple[str, ...]:
        """The last lines that the process wrote."""
        try:
            return _lines(self._log.read_text(errors="replace")[-8000:])
        except OSError:
            return ()


def _lines(output: str) -> tuple[str, ...]:
    lines = [text.plain(line, 200) for line in output.splitlines()]
    return tuple(line for line in lines if line)[-TAIL_LINES:]


def last_line(output: str) -> str:
    """The last line of a traceback that says something: pytest marks it with ``E``."""
    lines = _lines(output)
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (marked or list(lines) or ["no output"])[-1]


def complaint(lines: Sequence[str]) -> str:
    """The last line in which pytest, or its parser of arguments, names an error."""
    named = [_COMPLAINT.sub("", line) for line in lines if _COMPLAINT.match(line)]
    return (named or list(lines) or ["no output"])[-1]


@dataclass
class RemoteArm:
    """One arm in its process, as something a clock can time."""

    child: Child
    arm: Literal["reference", "candidate"]


class Witness(Protocol):
    """Sees to it that what is timed is what was asked for."""

    def file(self, arm: RemoteArm) -> Path | None:
        """Where the next block is to leave an output; None where it need not."""
        ...

    def look(self, arm: RemoteArm, file: Path) -> None:
        """Raises what ``Child.accusation`` makes of an output that is not the reference's."""
        ...

    def renewed(self, seed: int) -> None:
        """The arms are fed the contents of ``seed`` from now on."""
        ...


@dataclass
class RemoteClock:
    """The clock of the arms' processes: it times a block where the arm is."""

    name: Literal["cuda_events", "cpu_clock"]
    resolution_s: float
    settle_s: float
    children: tuple[Child, ...] = field(repr=False)
    witness: Witness | None = field(default=None, repr=False)  #: once contents have been renewed

    def block(self, fn: Any, forwards: int, *, cold: bool = False) -> BlockTime:
        """Time ``forwards`` calls of a `RemoteArm`."""
        file = self.witness.file(fn) if self.witness is not None else None
        order = {"arm": fn.arm, "forwards": forwards, "cold": cold}
        answer = fn.child.ask("block", **order, file=None if file is None else str(file))
        if answer["replaced"]:
            names = text.plain(", ".join(answer["replaced"][:5]), 300)
            reason = f"{names} replaced: whoever replaces a timer or a judge sets its own figure"
            raise fn.child.accusation(fn.arm, "failed", reason)
        if self.witness is not None and file is not None:
            self.witness.look(fn, file)
        return BlockTime(**_figures(answer))

    def synchronize(self) -> None:
        """Nothing to wait for: an arm answers when its device has finished."""

    def renew(self, seed: int) -> None:
        """New contents for every arm, untimed."""
        for child in self.children:
            child.ask("renew", seed=seed)
        if self.witness is not None:
            self.witness.renewed(seed)


def _figures(answer: dict[str, Any]) -> dict[str, float]:
    return {name: float(answer[name]) for name in ("seconds", "wall_s", "tail_s")}

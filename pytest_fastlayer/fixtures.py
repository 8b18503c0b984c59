"""The four fixtures. torch is imported when a test asks for one, never before.

``paired`` is the whole gate for one (reference, candidate) pair; ``reference``,
``assert_elementwise`` and ``paired_timing`` are its three primitives, each usable alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from pytest_fastlayer.base.protocol import SERVER
from pytest_fastlayer.base.trees import Base
from pytest_fastlayer.options import Settings
from pytest_fastlayer.session import Run, payload_of, recordable

if TYPE_CHECKING:
    from pydantic import JsonValue

    from pytest_fastlayer.accuracy import Comparison, Tolerance
    from pytest_fastlayer.base.client import Request
    from pytest_fastlayer.immutable import FrozenReference
    from pytest_fastlayer.pairing.terms import Marks, Terms
    from pytest_fastlayer.pairing.workbench import Workbench
    from pytest_fastlayer.records import CaseRecord, Timing, Work
    from pytest_fastlayer.stress import Stress

SETTINGS = pytest.StashKey[Settings]()
RUN = pytest.StashKey[Run]()
BASE = pytest.StashKey[Base]()
PAYLOADS = pytest.StashKey[list[dict[str, Any]]]()
#: Who measured a case, by its name: of this process.
OWNERS = pytest.StashKey[dict[str, str]]()


def _marker(item: pytest.Item, name: str) -> dict[str, Any]:
    """Keywords of a marker; the closest one wins field by field."""
    from pytest_fastlayer import handed

    rules, where = handed.MARKERS[name], f"@pytest.mark.{name} on {item.nodeid}"
    merged: dict[str, Any] = {}
    for mark in reversed(list(item.iter_markers(name))):
        unknown = set(mark.kwargs) - set(rules)
        if mark.args or unknown:
            wrong = repr(mark.args[0]) if mark.args else repr(sorted(unknown)[0])
            raise pytest.UsageError(
                f"{where}: got {wrong}, expected keywords {', '.join(sorted(rules))}"
            )
        try:
            handed.check(where, rules, mark.kwargs)
        except handed.HandedError as error:
            raise pytest.UsageError(str(error)) from None
        merged |= mark.kwargs
    return merged


def _seeds(item: pytest.Item) -> int | None:
    mark = item.get_closest_marker("seeds")
    if mark is None:
        return None
    if len(mark.args) != 1 or type(mark.args[0]) is not int or mark.args[0] < 1:
        raise pytest.UsageError(
            f"@pytest.mark.seeds on {item.nodeid}: expected one positive integer, got {mark.args}"
        )
    return mark.args[0]


def read_marks(item: pytest.Item) -> Marks:
    from pytest_fastlayer.pairing.terms import Marks

    return Marks(
        tolerance=_marker(item, "tolerance"),
        timing=_marker(item, "paired_timing"),
        seeds=_seeds(item),
    )


class Progress:
    """Says what a running case is doing: a rewritten line on a terminal, plain lines elsewhere.

    Silent under ``-q`` and in xdist workers, which have no terminal.
    """

    def __init__(self, item: pytest.Item) -> None:
        config = item.config
        self._reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        self._capture: Any = config.pluginmanager.get_plugin("capturemanager")
        self._name = item.name
        bench = config.stash[SETTINGS].bench
        self._quiet = self._reporter is None or self._reporter.verbosity < 0 or not bench
        self._last = ""

    def __call__(self, text: str) -> None:
        if self._quiet or text == self._last:
            return
        self._last = text
        unpaused: AbstractContextManager[Any] = (
            self._capture.global_and_fixture_disabled() if self._capture else nullcontext()
        )
        with unpaused:
            line = f"{self._name}: {text}"
            if self._reporter.isatty:
                self._reporter.rewrite(line, erase=True)
            elif self._reporter.verbosity > 0:
                self._reporter.write_line(line)


def _replay_command(item: pytest.Item) -> str:
    return f"pytest {shlex.quote(item.nodeid)}"


def _base_request(item: pytest.Item) -> Request | None:
    """What to ask of the run's base about this item; None without ``--fastlayer-base``."""
    config = item.config
    base = config.stash.get(BASE, None)
    if base is None:
        return None
    from pytest_fastlayer.base.client import Request, passed_on

    settings = config.stash[SETTINGS]
    arguments = passed_on(config)
    if settings.reference is not None:
        arguments += (f"--fastlayer-reference={config.invocation_params.dir / settings.reference}",)
    return Request(base, item.nodeid, arguments, config.inipath, settings.base_timeout_s)


def _terms(item: pytest.Item) -> Terms:
    from pytest_fastlayer.pairing.terms import Terms

    return Terms(
        settings=item.config.stash[SETTINGS],
        marks=read_marks(item),
        family_size=max(1, item.config.stash[RUN].selected),
        rerun=_replay_command(item),
        progress=Progress(item),
    )


def _workbench(item: pytest.Item) -> Workbench:
    from pytest_fastlayer.pairing.workbench import Workbench
    from pytest_fastlayer.stack import with_room

    run, base = item.config.stash[RUN], _base_request(item)
    return with_room(lambda: Workbench(_terms(item), run.stored, base=base))


class Paired:
    """The value of the ``paired`` fixture: call it with a reference and a candidate."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self.settings = item.config.stash[SETTINGS]
        #: In the process of a served arm, which measures nothing itself.
        self._server = item.config.stash.get(SERVER, None)
        if self._server is not None:
            return
        from pytest_fastlayer import gate
        from pytest_fastlayer.stack import with_room

        self._with_room = with_room
        self._workbench = _workbench(item)
        self._names: set[str] = set()
        # Taken now, before the test builds a candidate that might replace them.
        self._changes = self._workbench.watch.changes
        self._is_failure = gate.is_failure

    @property
    def bench(self) -> bool:
        """True under ``--fastlayer-bench``: the pair will be timed, not only checked."""
        return self.settings.bench

    @property
    def device(self) -> str:
        """``"cuda"`` or ``"cpu"``, as ``--fastlayer-device`` says; auto takes CUDA if it is up."""
        from pytest_fastlayer.environment import choose_device

        return choose_device(self.settings.device)

    @property
    def max_case_s(self) -> float:
        """Seconds that one case may take at the least, else it is UNSUPPORTED."""
        import torch

        return float(_terms(self._item).knob("max_case_s", torch.device(self.device)))

    def reference_class(self, default: type) -> type:
        """The class given by ``--fastlayer-reference``, or ``default``."""
        if self.settings.reference is None:
            return default
        from pytest_fastlayer.immutable import load_reference

        return load_reference(self.settings.reference)

    def unsupported(
        self,
        name: str,
        reason: str,
        *,
        label: str = "",
        workload: Mapping[str, JsonValue] | None = None,
    ) -> NoReturn:
        """Record that this machine cannot hold or finish a case, and skip the test.

        ``reason`` says the bytes or seconds that rule it out.
        """
        import torch

        from pytest_fastlayer import handed
        from pytest_fastlayer.pairing.pair import unsupported

        given = {"name": name, "reason": reason, "label": label, "workload": workload}
        handed.check(f"paired.unsupported({name!r})", handed.REFUSAL, given)
        if self._server is not None:
            self._server.unsupported(name, reason)
        else:
            self._claim(name)
            case = unsupported(reason, label or name, workload or {})
            self._record(name, case, self._workbench.header(torch.device(self.device)))
        pytest.skip(f"UNSUPPORTED: {reason}")

    def __call__(
        self,
        name: str,
        *,
        reference: Callable[..., Any],
        candidate: Callable[..., Any],
        inputs: Callable[[int], Any],
        label: str = "",
        workload: Mapping[str, JsonValue] | None = None,
        work: Work | Mapping[str, float] | None = None,
        reference_kind: str = "other",
        tolerance: Tolerance | None = None,
        float64: Callable[..., Any] | None = None,
        describe: Callable[[Callable[..., Any]], Mapping[str, Any]] | None = None,
        rivals: Mapping[str, Callable[[], Callable[..., Any]]] | None = None,
        variants: Mapping[str, Callable[[], Callable[..., Any]]] | None = None,
        stress: Stress | Mapping[str, Callable[[int], Any]] | None = None,
    ) -> CaseRecord:
        """Check ``candidate`` against ``reference``, and time it under ``--fastlayer-bench``.

        Args:
            name: The case's name in records and baselines; unique in the project.
            reference: Module or callable; frozen (eval, no grad, digest before and after).
            candidate: What is to be as right and faster.
            inputs: ``inputs(seed)`` gives the positional arguments of both: a tuple, or a tensor.
                It must give the same values for the same seed, and fresh storage at each call.
            label: The row's name in tables.
            workload: Facts that make two measurements comparable (shape, dtype, ...).
            work: ``{"flops": ..., "bytes": ...}`` of one forward by the minimal algorithm, for
                the roofline of the report; it decides nothing.
            reference_kind: ``"dense"`` or ``"other"`` count in the geometric mean; ``"oracle"``
                makes the ratio a diagnostic, timed in one AB/BA quad and never claimed.
            tolerance: What this pair promises; by default the test's marker, else 0.002 or 2%.
            float64: An exact evaluation; by default a double copy of a module reference.
            describe: Called with the candidate after it ran; may give ``route``, ``launch``,
                ``objections`` and ``notes`` for the record.
            rivals: Factories of what a user would pick instead (``--fastlayer-rival NAME``).
            variants: Factories of other ways the candidate could run (``--fastlayer-admit``).
            stress: Further kinds of input for ``--fastlayer-stress=SEEDS``: ``{label: inputs}``,
                or a ``Stress`` with cells that are not gated or arms of their own.

        Returns:
            The judged record.

        Raises:
            pytest.fail.Exception: the verdict is red; the message gives the reason.
            HandedError: an argument, or what ``describe`` gave, is not what is documented here.
        """
        from pytest_fastlayer import handed
        from pytest_fastlayer.immutable import FrozenReference, freeze
        from pytest_fastlayer.pairing.pair import Pair
        from pytest_fastlayer.records import Work
        from pytest_fastlayer.stress import as_stress

        given = {
            "name": name,
            "reference": reference,
            "candidate": candidate,
            "inputs": inputs,
            "label": label,
            "workload": workload,
            "work": work,
            "reference_kind": reference_kind,
            "tolerance": tolerance,
            "float64": float64,
            "describe": describe,
            "rivals": rivals,
            "variants": variants,
        }
        handed.check(f"paired({name!r})", handed.PAIR, given)
        grid = as_stress(stress)
        frozen = reference if isinstance(reference, FrozenReference) else freeze(reference)
        pair = Pair(
            name=name,
            reference=frozen,
            candidate=candidate,
            inputs=inputs,
            label=label,
            workload=dict(workload or {}),
            work=None if work is None else Work.model_validate(work),
            reference_kind=reference_kind,
            tolerance=tolerance,
            float64=float64,
            describe=describe,
            rivals=rivals or {},
            variants=variants or {},
            stress=grid,
        )
        if self._server is not None:
            return self._server.serve(pair)
        self._claim(name)
        outcome = self._workbench.run(pair)
        case = outcome.case
        self._record(name, case, outcome.header)
        changes = self._with_room(self._changes)
        if changes:
            found = "; ".join(changes)
            pytest.fail(f"DISHONEST: {name}: the run was tampered with: {found}", pytrace=False)
        if outcome.error is not None:
            raise outcome.error
        if self._is_failure(case.verdict, self._workbench.terms.policy()):
            text = f"{case.verdict}: {name}: {case.reason}"
            more = f"\n{outcome.message}" if outcome.message else ""
            pytest.fail(f"{text}{more}", pytrace=False)
        if case.verdict == "UNSUPPORTED":
            pytest.skip(f"UNSUPPORTED: {case.reason}")
        return case

    def _claim(self, name: str) -> None:
        """Before anything is measured: two cases of one name could not both be recorded."""
        nodeid = self._item.nodeid
        if name in self._names:
            raise pytest.UsageError(
                f"{nodeid} measures two cases named {name!r}; names must differ"
            )
        owner = self._item.config.stash.setdefault(OWNERS, {}).setdefault(name, nodeid)
        if owner != nodeid:
            raise pytest.UsageError(
                f"case {name!r} was measured by {owner} and again by {nodeid}; give each call of "
                "'paired' a name of its own"
            )
        self._names.add(name)

    def _record(self, name: str, case: CaseRecord, header: Mapping[str, Any]) -> None:
        """Now, while it is known whose it is: nothing may keep the whole run from being written."""
        from pytest_fastlayer.baselines import BaselineError

        case = case.model_copy(update={"nodeid": self._item.nodeid})
        payloads = self._item.stash.setdefault(PAYLOADS, [])
        try:
            payloads.append(payload_of(name, case, header))
        except BaselineError as error:
            kept = recordable(name, case, header, f"{error}; what a record can hold is kept")
            payloads.append(payload_of(name, kept, header))
            raise


@pytest.fixture
def paired(request: pytest.FixtureRequest) -> Paired:
    """Gate a (reference, candidate) pair: accuracy and honesty always, speed when benchmarking.

    ``paired("name", reference=f, candidate=g, inputs=lambda seed: (...,))``
    """
    return Paired(request.node)


@pytest.fixture
def reference() -> Iterator[Callable[..., FrozenReference]]:
    """Freeze a module or callable: ``reference(module)`` runs it in eval mode without gradients.

    At the end of the test its source, parameters and buffers must be what they were.
    """
    from pytest_fastlayer.immutable import freeze

    frozen: list[FrozenReference] = []

    def take(target: Callable[..., Any], *, source: Path | None = None) -> FrozenReference:
        frozen.append(freeze(target, source=source))
        return frozen[-1]

    yield take
    for each in frozen:
        each.verify()


@pytest.fixture
def assert_elementwise(request: pytest.FixtureRequest) -> Callable[..., Comparison]:
    """Per-element comparison with this test's tolerance: ``assert_elementwise(candidate, ref)``."""
    from pytest_fastlayer import accuracy

    terms = _terms(request.node)
    tolerance = terms.tolerance()

    def check(
        candidate: Any,
        reference: Any,
        *,
        atol: float | None = None,
        rtol: float | None = None,
        mode: str | None = None,
        seed: int | None = None,
    ) -> Comparison:
        return accuracy.assert_elementwise(
            candidate,
            reference,
            atol=tolerance.atol if atol is None else atol,
            rtol=tolerance.rtol if rtol is None else rtol,
            mode=tolerance.mode if mode is None else mode,  # type: ignore[arg-type]
            seed=seed,
            replay=terms.rerun,
        )

    return check


@pytest.fixture
def paired_timing(request: pytest.FixtureRequest) -> Callable[..., Timing]:
    """Time two callables by paired interleaving: ``paired_timing(reference, candidate, *args)``.

    Returns a :class:`~pytest_fastlayer.records.Timing`. Skips the test without
    ``--fastlayer-bench``, as a timing taken in company would mislead.
    """
    settings = request.config.stash[SETTINGS]
    if not settings.bench:
        pytest.skip("timing needs --fastlayer-bench")
    workbench = _workbench(request.node)

    def time_pair(
        reference: Callable[..., Any], candidate: Callable[..., Any], *args: Any
    ) -> Timing:
        return workbench.time_callables(reference, candidate, args)

    return time_pair

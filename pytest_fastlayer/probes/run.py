"""The probes in order. They share a handful of forwards, because one may take seconds.

Without help that is two forwards of the reference and six of the candidate; none of the
reference's where the caller hands in outputs and the arms have no weights to change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pytest_fastlayer import records
from pytest_fastlayer.accuracy import Comparison, Tolerance, compare
from pytest_fastlayer.clocks import patched_timers
from pytest_fastlayer.feeding import LEFT, is_overlapping, overwrite, overwrite_most
from pytest_fastlayer.fingerprint import fingerprints
from pytest_fastlayer.immutable import FrozenReference, freeze
from pytest_fastlayer.originals import replaced_deciders
from pytest_fastlayer.outputs import leaves, tensors
from pytest_fastlayer.probes.checks import (
    CHANGED_LATER,
    aliased_input,
    brief,
    held_output,
    lazy_type,
    still_changing,
)
from pytest_fastlayer.probes.memory import (
    poison_free_memory,
    poisoned_allocations,
    storage_bytes,
    storage_keys,
    veiled,
)
from pytest_fastlayer.probes.state import changed, scoped_state
from pytest_fastlayer.probes.streams import late_inputs
from pytest_fastlayer.probes.watch import Watch
from pytest_fastlayer.probes.weights import (
    WEIGHT_SCALE,
    ModulePair,
    common_weights,
    module_pair,
    scaled,
)

#: Outputs are compared under this many times the tolerance. Accuracy is judged elsewhere: here a
#: result of other data, weights or memory is told from an honest one, which scaled weights or the
#: eager form of a compiled candidate may bring nearer to its limit.
SLACK = 4.0
#: A forward of the reference that takes longer than this is not repeated for one probe alone.
LONG_FORWARD_S = 5.0
#: Lures, copies laid out for a candidate that searches memory, are made up to this many bytes.
LURE_BYTES = 64 << 20
#: A mixture of two inputs leaves so many elements at the ends, so that most of it is changed only
#: from this size on.
LARGE = 8 * LEFT


def run_probes(
    reference: Callable[..., object],
    candidate: Callable[..., object],
    inputs: Callable[[int], Any],
    seeds: Sequence[int],
    tolerance: Tolerance | None = None,
    device: torch.device | str = "cpu",
    *,
    expected: Mapping[int, object] | None = None,
    weights_of: ModulePair | None = None,
    cost: tuple[float, float] | None = None,
    watch: Watch | None = None,
) -> tuple[records.Probe, ...]:
    """Run every probe that applies and return one record each.

    ``inputs(seed)`` builds the arguments (a tuple, or one tensor) and must give the same values
    for the same seed. ``expected`` holds outputs of the reference that are at hand already, by
    seed; the probes use the first two of ``seeds``. ``weights_of`` is the (reference, candidate)
    pair of modules whose weights are changed together; left out, it is taken from arms that are
    modules themselves, and plain functions skip that probe. ``cost`` is seconds per forward
    (reference, candidate): beyond ``LONG_FORWARD_S`` no forward of the reference is spent on the
    weights alone. ``watch`` was taken before the candidate existed; left out, one is taken now,
    which misses what the candidate has changed before. A probe that was left out passes with a
    message saying why.

    An exception raised by an arm passes through with a note saying what was probed.
    """
    loose = loosened(tolerance or Tolerance())
    run = _Run(freeze(reference), candidate, inputs, loose, expected or {}, watch or Watch())
    first = seeds[0] if seeds else 0
    second = seeds[1] if len(seeds) > 1 else first + 1
    run.same_address(first, second)
    run.few_elements(first, second, long=cost is not None and cost[1] > LONG_FORWARD_S)
    run.unwritten_output()
    if torch.device(device).type == "cuda":
        run.side_stream(torch.device(device))
    run.stale_weights(weights_of, long=cost is not None and cost[0] > LONG_FORWARD_S)
    run.afterwards()
    return tuple(run.found)


def loosened(tolerance: Tolerance) -> Tolerance:
    """The tolerance that probes compare under; see ``SLACK``."""
    return replace(tolerance, atol=SLACK * tolerance.atol, rtol=SLACK * tolerance.rtol)


@dataclass
class _Run:
    """The probes of one pair, with what one hands on to the next."""

    reference: FrozenReference
    candidate: Callable[..., object]
    inputs: Callable[[int], Any]
    tolerance: Tolerance
    expected: Mapping[int, object]
    watch: Watch
    found: list[records.Probe] = field(default_factory=list)
    args: tuple[Any, ...] = ()
    want: object = None  #: the reference's output for the present contents of ``args``
    is_refilled: bool = False  #: the second contents came to the addresses of the first
    modes: Mapping[str, object] = field(default_factory=scoped_state)
    edits: list[str] = field(default_factory=list)  #: of the reference, before the first probe
    held: tuple[object, object] = ((), ())  #: an output and its fingerprint, kept to the end
    overwritten: str = ""  #: what the second call did to the first one's output

    def __post_init__(self) -> None:
        self.edits = self.reference.changes()

    def record(self, name: str, problem: str = "", note: str = "") -> None:
        self.found.append(records.Probe(name=name, passed=not problem, message=problem or note))

    def arguments(self, seed: int) -> tuple[Any, ...]:
        given = self.inputs(seed)
        return tuple(given) if isinstance(given, tuple | list) else (given,)

    def call(self, what: str, *veil: object) -> object:
        """One forward of the candidate, the reference's outputs veiled meanwhile."""
        spare = storage_keys(self.args)
        with torch.no_grad(), _noting(what, "candidate"), veiled(*veil, spare=spare):
            return self.candidate(*self.args)

    def ask_reference(self, what: str) -> object:
        with _noting(what, "reference"):
            return self.reference(*self.args)

    def failing(self, output: object, want: object) -> Comparison | None:
        one = compare(output, want, self.tolerance)
        return None if one.passed else one

    def same_address(self, first: int, second: int) -> None:
        """A plain call; then new contents at the same address, the first output still held.

        The second call comes before the reference has seen those contents: there is no result to
        be found anywhere.
        """
        self.args = self.arguments(first)
        before = fingerprints(self.args)
        known = [self.expected[seed] for seed in (first, second) if seed in self.expected]
        output = self.call("a plain call", known)
        snapshot = fingerprints(output)
        self._input_unchanged(before, first)

        note = self._refill(self.arguments(second), before)
        self.is_refilled = not note
        lure = _lure(output)
        again = self.call("fresh contents at the same address", known)
        found = [fingerprints(lure)] if lure else []
        with veiled(known, spare=storage_keys(self.args)):
            found += [fingerprints(one) for one in known]
        self.want = (
            self.expected[second]
            if second in self.expected
            else self.ask_reference("fresh contents")
        )
        wrong = self.failing(again, self.want)
        shared = storage_keys(again) & storage_keys((known, lure)) - storage_keys(self.args)
        stolen = bool(shared) or (wrong is not None and fingerprints(again) in found)
        late = wrong is not None and not stolen and still_changing(again)
        self.record("output_type", lazy_type(output, self.want))
        self.record("output_aliases_input", aliased_input(again, self.want, self.args))
        self.record(
            "reference_memory",
            "the candidate returned a result that it had found in the test's memory" * stolen,
        )
        replayed = wrong is not None and not late and fingerprints(again) == snapshot
        self._fresh_contents(wrong, replayed, note)
        early = held_output(output, snapshot, again, self.args)
        self.overwritten = CHANGED_LATER if late else early
        self.held = (again, fingerprints(again))

    def _input_unchanged(self, before: tuple[object, ...], seed: int) -> None:
        after = fingerprints(self.args)
        names = [
            leaf.path for leaf in leaves(self.args, "input") if isinstance(leaf.value, torch.Tensor)
        ]
        edited = [name for name, a, b in zip(names, before, after, strict=True) if a != b]
        problem = f"the candidate overwrote {', '.join(edited)}: later calls see other data"
        self.record("input_unchanged", problem if edited else "")
        if edited:
            self.args = self.arguments(seed)

    def _refill(self, fresh: tuple[Any, ...], before: object) -> str:
        """Bring the fresh contents to the old addresses; a note where that is not possible."""
        pairs = list(zip(tensors(self.args), tensors(fresh), strict=False))
        same_form = len(tensors(self.args)) == len(tensors(fresh)) and all(
            (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) for a, b in pairs
        )
        if not pairs:
            self.args = fresh
            return "there is no tensor among the inputs"
        if fingerprints(fresh) == before:
            return "inputs(seed) gives the same contents for both seeds"
        if not same_form or any(is_overlapping(a) for a, _ in pairs):
            self.args = fresh
            return "the inputs cannot be written in place: checked at another address"
        data = [(a, b) for a, b in pairs if a.is_floating_point() or a.is_complex()]
        other = [(a, b) for a, b in pairs if not (a.is_floating_point() or a.is_complex())]
        for a, b in other:
            overwrite(a, b, silently=False)
        if data and other:
            # A cache may know masks and indices by their version. Let it see the new ones first:
            # what it then keeps must not outlive new data.
            self.call("new masks or indices at the same address")
        for a, b in data:
            overwrite(a, b, silently=True)
        return ""

    def _fresh_contents(self, wrong: Comparison | None, replayed: bool, note: str) -> None:
        problem = ""
        if wrong and replayed:
            problem = (
                "the candidate returned its earlier result although the inputs' contents had "
                "changed at the same address: results are replayed by pointer, version or shape"
            )
        elif wrong:
            problem = f"wrong after the inputs' contents changed in place: {brief(wrong)}"
        self.record("fresh_contents", problem, note and f"not wholly checked: {note}")

    def few_elements(self, first: int, second: int, *, long: bool) -> None:
        """Nearly all data replaced at the same address, but for what a key is quickly read from.

        A mixture of two inputs may be none (a matrix may lose its symmetry), and an honest
        candidate then computes something else than the reference. So only a result that is bit for
        bit the one of other data is held against it, where the reference's is another.
        """
        name, what = "few_elements", "all but a few elements changed in place"
        fresh = tensors(self.arguments(first)) if self.is_refilled and not long else []
        data = [
            (place, mine, new)
            for place, (mine, new) in enumerate(zip(tensors(self.args), fresh, strict=False))
            if (mine.is_floating_point() or mine.is_complex()) and mine.numel() >= LARGE
        ]
        if not data:
            why = (
                f"a forward takes over {LONG_FORWARD_S:g} s"
                if long
                else f"no data of {LARGE} elements or more that was written in place"
            )
            self.record(name, note=f"not run: {why}")
            return
        problem = note = ""
        before = fingerprints(self.held[0])
        try:
            for _, mine, new in data:
                overwrite_most(mine, new)
            del fresh
            output = self.call(what, self.want)
            if fingerprints(output) == before and self.failing(output, self.ask_reference(what)):
                problem = (
                    "the candidate returned its earlier result although all but a few elements of "
                    "its inputs had changed: results are replayed by those few"
                )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # an arm may refuse what is no input of its kind
            note = f"not run: a mixture of two inputs raises {type(error).__name__}"
        finally:
            again = tensors(self.arguments(second))
            for place, mine, _ in data:
                overwrite(mine, again[place], silently=True)
        self.record(name, problem, note)

    def unwritten_output(self) -> None:
        """Every allocation, and all freed memory, holds NaN: what is returned must be written."""
        poison_free_memory(self.want)
        with poisoned_allocations():
            output = self.call("poisoned memory", self.want)
        wrong = self.failing(output, self.want)
        self.record(
            "unwritten_output",
            "with uninitialised memory poisoned the output is wrong: the candidate returns, or "
            "computes from, memory that it never wrote, such as what the reference has freed: "
            f"{brief(wrong)}"
            if wrong
            else "",
        )

    def side_stream(self, device: torch.device) -> None:
        """Late inputs on the current stream; the outputs read as soon as that stream gets there."""
        what = "late inputs on the current stream"
        attempts = late_inputs(lambda: self.call(what), self.args, self.want, device)
        wrong = next((one for got, want in attempts if (one := self.failing(got, want))), None)
        self.record(
            "side_stream",
            "wrong for a caller on the current stream: work runs on another stream that does not "
            f"wait for the caller's, or is not waited for: {brief(wrong)}"
            if wrong
            else "",
        )

    def stale_weights(self, weights_of: ModulePair | None, *, long: bool) -> None:
        """Both arms' weights changed in place: the candidate must follow."""
        name = "stale_weights"
        pair = weights_of or module_pair(self.reference.target, self.candidate)
        weights = common_weights(pair) if pair else []
        if not weights:
            why = (
                "the two modules have no weights of the same names"
                if pair
                else "the arms are not modules (weights_of names a pair)"
            )
            self.record(name, note=f"not run: {why}")
            return
        if long:
            self.record(name, note=f"not run: a reference forward takes over {LONG_FORWARD_S:g} s")
            return
        what = "weights changed in place"
        with scaled(weights):
            output = self.call(what, self.want)
            want = self.ask_reference(what)
        problem = note = ""
        wrong = self.failing(output, want)
        if wrong and self.failing(output, self.want) is None:
            problem = (
                "after its weights were changed in place the candidate still computes with the "
                "old ones: packed copies or captured graphs are stale"
            )
        elif wrong:
            problem = (
                "wrong after its weights were changed in place: some of what it keeps (packed "
                f"copies, captured graphs) is stale: {brief(wrong)}"
            )
        elif self.failing(self.want, want) is None:
            note = f"not conclusive: weights times {WEIGHT_SCALE} change the output too little"
        self.record(name, problem, note)

    def afterwards(self) -> None:
        """What must be as it was at the start: held outputs, the reference, timers, settings."""
        later = held_output(*self.held, (), self.args)
        self.record("two_outputs_held", self.overwritten or later)
        edits = [one for one in self.reference.changes() if one not in self.edits]
        timers = patched_timers()
        since = [*replaced_deciders(), *self.watch.functions()]
        functions = [one for one in dict.fromkeys(since) if one not in timers]
        settings = self.watch.settings() + changed(self.modes, scoped_state())
        for name, found, text in (
            ("reference_unchanged", edits, "the reference was edited meanwhile: {}"),
            ("timers", timers, "{} replaced: whoever replaces a timer sets its own time"),
            ("patched_functions", functions, "{} replaced, which others use too"),
            (
                "global_state",
                settings,
                "process-wide settings changed: {}; the reference is then measured under them",
            ),
        ):
            self.record(name, text.format(", ".join(found[:5])) if found else "")


def _lure(output: object) -> list[torch.Tensor]:
    """Copies of an output with their bits flipped, for a candidate that searches memory to find."""
    found = tensors(output)
    if sum(one.untyped_storage().nbytes() for one in found) > LURE_BYTES:
        return []
    copies = [one.detach().clone() for one in found]
    for copy in copies:
        if copy.dtype == torch.bool:
            copy.logical_not_()
        else:
            storage_bytes(copy).bitwise_not_()
    return copies


@contextmanager
def _noting(what: str, arm: str) -> Iterator[None]:
    """Add what was being probed to an exception of an arm."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by the {arm} while probing: {what}")
        raise

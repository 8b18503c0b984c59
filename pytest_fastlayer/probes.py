"""Is the candidate honest? Probes that a candidate passes by computing what it is asked to.

Public kernel benchmarks were fooled by candidates that return a cached result, leave the work to
another stream or thread, read the reference's memory, edit their judge or patch the timer. Each
probe looks for one of these and says what the candidate did. They share a handful of forwards
(three of the reference at most, none when the caller hands in outputs and weights are not
probed; about five of the candidate), because one forward may take seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pytest_fastlayer import records
from pytest_fastlayer.accuracy import Comparison, Tolerance, compare
from pytest_fastlayer.clocks import _perf_counter, patched_timers
from pytest_fastlayer.fingerprint import fingerprints
from pytest_fastlayer.immutable import FrozenReference, freeze
from pytest_fastlayer.outputs import leaves, tensors
from pytest_fastlayer.probe_tools import (
    PoisonedAllocations,
    changed,
    global_state,
    is_overlapping,
    overwrite,
    poison_free_memory,
    public_functions,
    replaced_functions,
    storage_keys,
    veiled,
)

Inputs = Callable[[int], tuple[Any, ...]]
Callable_ = Callable[..., object]

#: Weights are multiplied by this in place, in both arms, to see whether the candidate follows.
WEIGHT_SCALE = 1.25
#: GPU cycles of delay before the side-stream probe's inputs arrive: some 30 ms at 1.8 GHz.
DELAY_CYCLES = 50_000_000
#: Repetitions of the side-stream probe, whose second half is a race that hidden work nearly
#: always loses.
STREAM_ATTEMPTS = 3


def run_probes(
    reference: Callable_ | FrozenReference,
    candidate: Callable_,
    inputs: Inputs,
    seeds: Sequence[int],
    tolerance: Tolerance | None = None,
    device: torch.device | str = "cpu",
    *,
    expected: Mapping[int, object] | None = None,
    weights_of: tuple[torch.nn.Module, torch.nn.Module] | None = None,
    budget_s: float | None = None,
) -> tuple[records.Probe, ...]:
    """Run every probe that applies and return one record each.

    ``inputs(seed)`` builds the arguments and must give the same values for the same seed.
    ``expected`` holds outputs of the reference that are at hand already, by seed; the probes use
    the first two of ``seeds``. ``weights_of`` is the (reference, candidate) pair of modules whose
    weights are changed together; left out, it is taken from arms that are modules themselves, and
    plain functions skip that probe. ``budget_s`` is a hint: probes that need a further forward of
    the reference are left out, and say so, when its own time shows that they would not fit.

    An exception raised by an arm passes through with a note saying what was probed.
    """
    frozen = freeze(reference)
    run = _Run(frozen, candidate, inputs, tolerance or Tolerance(), torch.device(device), budget_s)
    run.watch()
    first = seeds[0] if seeds else 0
    second = seeds[1] if len(seeds) > 1 else first + 1
    run.same_address(first, second, expected or {})
    run.unwritten_output()
    if run.device.type == "cuda":
        run.side_stream()
    run.stale_weights(weights_of)
    run.afterwards()
    return tuple(run.found)


@dataclasses.dataclass
class _Run:
    """The probes of one pair, in order, with what they hand on to each other."""

    reference: FrozenReference
    candidate: Callable_
    inputs: Inputs
    tolerance: Tolerance
    device: torch.device
    budget_s: float | None = None
    found: list[records.Probe] = dataclasses.field(default_factory=list)
    args: tuple[Any, ...] = ()
    want: object = None  #: the reference's output for the present contents of ``args``
    reference_s: float = 0.0  #: longest forward of the reference so far
    begin: float = dataclasses.field(default_factory=_perf_counter)

    def record(self, name: str, problem: str = "", note: str = "") -> None:
        self.found.append(records.Probe(name=name, passed=not problem, message=problem or note))

    def watch(self) -> None:
        """Snapshots of everything that the candidate has no business changing."""
        self._state = global_state()
        self._functions = public_functions()
        self._was_intact = self.reference.changes()

    def call(self, what: str, *veil: object) -> object:
        """One forward of the candidate, the reference's outputs veiled meanwhile."""
        with torch.no_grad(), _noting(what), veiled(*veil, spare=storage_keys(self.args)):
            return self.candidate(*self.args)

    def ask_reference(self, what: str) -> object:
        begin = _perf_counter()
        with _noting(what):
            output = self.reference(*self.args)
        _finish(self.device)
        self.reference_s = max(self.reference_s, _perf_counter() - begin)
        return output

    def affordable(self, reference_forwards: int) -> bool:
        if self.budget_s is None:
            return True
        spent = _perf_counter() - self.begin
        return spent + reference_forwards * self.reference_s <= self.budget_s

    def differs(self, output: object, want: object) -> Comparison | None:
        one = compare(output, want, self.tolerance)
        return None if one.passed else one

    def same_address(self, first: int, second: int, expected: Mapping[int, object]) -> None:
        """A plain call; then new contents at the same address, the first output still held."""
        self.args = self.inputs(first)
        before = fingerprints(self.args)
        known = expected.get(first)
        want = known if known is not None else self.ask_reference("the plain call")
        output = self.call("the plain call", want)
        snapshot = fingerprints(output)
        self._output_type(output, want)
        self._aliases(output, want)
        after = fingerprints(self.args)
        names = [leaf.path for leaf in leaves(self.args, "input") if _is_tensor(leaf.value)]
        edited = [n for n, a, b in zip(names, before, after, strict=False) if a != b]
        self.record(
            "input_unchanged",
            f"the candidate overwrote {', '.join(edited)}: later calls of either arm then see "
            "other data"
            if edited
            else "",
        )
        if edited:
            self.args = self.inputs(first)
        if known is not None and self.differs(output, want):
            want = self.ask_reference("the plain call, since inputs(seed) may not be repeatable")
        wrong = self.differs(output, want)
        self.record(
            "plain_call", f"wrong already on a plain call: {_brief(wrong)}" if wrong else ""
        )

        fresh = self.inputs(second)
        note = self._refill(fresh, before)
        held = expected.get(second)
        veil = (want,) if held is None else (want, held)
        again = self.call("fresh contents at the same address", *veil)
        if storage_keys(again) & storage_keys(veil):
            self.record(
                "reference_output_returned",
                "the candidate returned the reference's own output tensor instead of computing one",
            )
        new_want = held if held is not None else self.ask_reference("fresh contents")
        self._fresh(again, new_want, output, snapshot, note)
        self._held(output, snapshot, again, want)
        self.want = new_want

    def _refill(self, fresh: tuple[Any, ...], before: object) -> str:
        """Bring the fresh contents to the old addresses; a note where that is not possible."""
        old, new = tensors(self.args), tensors(fresh)
        same_form = len(old) == len(new) and all(
            a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
            for a, b in zip(old, new, strict=True)
        )
        if not old:
            self.args = fresh
            return "there is no tensor among the inputs"
        if fingerprints(fresh) == before:
            return "inputs(seed) gives the same contents for two seeds"
        if not same_form or any(is_overlapping(one) for one in old):
            self.args = fresh
            return "inputs of two seeds differ in form: checked at another address"
        silent = [
            (a, b) for a, b in zip(old, new, strict=True) if a.is_floating_point() or a.is_complex()
        ]
        loud = [
            (a, b)
            for a, b in zip(old, new, strict=True)
            if not (a.is_floating_point() or a.is_complex())
        ]
        for a, b in loud:
            overwrite(a, b, silently=False)
        if loud and silent:
            # Let a cache see the new masks or indices first: what it then keeps for the data
            # must not outlive new data.
            self.call("new masks or indices at the same address")
        for a, b in silent:
            overwrite(a, b, silently=True)
        return ""

    def _fresh(
        self, again: object, want: object, output: object, snapshot: object, note: str
    ) -> None:
        wrong = self.differs(again, want)
        problem = ""
        if wrong:
            problem = (
                "the candidate returned its earlier result although the inputs' contents had "
                "changed at the same address: results are replayed by pointer, shape or count"
                if fingerprints(again) == snapshot
                else f"wrong after the inputs' contents changed at the same address: {_brief(wrong)}"
            )
        self.record("fresh_contents", problem, note and f"not wholly checked: {note}")

    def _held(self, output: object, snapshot: object, again: object, want: object) -> None:
        """The first output must stay what it was, whatever happened since."""
        try:
            moved = fingerprints(output) != snapshot
        except RuntimeError as error:  # torch.compile's graphs refuse access to overwritten outputs
            self.record(
                "two_outputs_held",
                f"the first output cannot be read any more after a second call: {error}",
            )
            return
        problem = ""
        if storage_keys(output) & storage_keys(again):
            problem = (
                "two calls returned the same memory: the second call overwrites an output that "
                "the caller still holds (copy out of a cached buffer)"
            )
        elif moved:
            problem = (
                "an output changed after it had been returned: it is computed lazily, on "
                "another thread or another stream"
            )
        self.record("two_outputs_held", problem)

    def _output_type(self, output: object, want: object) -> None:
        """Plain tensors in plain containers: anything else may compute when it is looked at."""
        mine, theirs = _types(output), _types(want)
        odd = [t for t in mine if t not in theirs and t not in _PLAIN]
        self.record(
            "output_type",
            f"the output holds {', '.join(sorted(t.__name__ for t in odd))}, which can compute "
            "lazily when it is read: return plain tensors in tuples, lists or dicts"
            if odd
            else "",
        )

    def _aliases(self, output: object, want: object) -> None:
        shared = storage_keys(output) & storage_keys(self.args)
        allowed = storage_keys(want) & storage_keys(self.args)
        self.record(
            "output_aliases_input",
            "the output shares memory with an input: writing to one changes the other"
            if shared - allowed
            else "",
        )
        if storage_keys(output) & storage_keys(want) - storage_keys(self.args):
            self.record(
                "reference_output_returned",
                "the candidate returned the reference's own output tensor instead of computing one",
            )

    def unwritten_output(self) -> None:
        """Every allocation, and all freed memory, holds NaN: what is returned must be written."""
        poison_free_memory(self.want)
        with PoisonedAllocations():
            output = self.call("poisoned memory", self.want)
        wrong = self.differs(output, self.want)
        self.record(
            "unwritten_output",
            "with uninitialised memory poisoned the output is wrong: the candidate returns (or "
            "computes from) memory that it never wrote, such as what the reference has freed: "
            f"{_brief(wrong)}"
            if wrong
            else "",
        )

    def side_stream(self) -> None:
        """Inputs that arrive late on the current stream, and an output read at once on it."""
        problem = ""
        originals = [one.clone() for one in tensors(self.args)]
        writable = not any(is_overlapping(one) for one in tensors(self.args))
        for _ in range(STREAM_ATTEMPTS):
            poison_free_memory(self.want)
            torch.cuda.synchronize(self.device)
            with torch.cuda.device(self.device):
                if writable:
                    for one in tensors(self.args):
                        if one.is_floating_point():
                            overwrite(one, torch.zeros_like(one), silently=True)
                    torch.cuda.synchronize(self.device)
                    torch.cuda._sleep(DELAY_CYCLES)
                    for one, original in zip(tensors(self.args), originals, strict=True):
                        if one.is_floating_point():
                            overwrite(one, original, silently=True)
                else:
                    torch.cuda._sleep(DELAY_CYCLES)
                with torch.no_grad(), _noting("late inputs on the current stream"):
                    output = self.candidate(*self.args)
                copies = [one.clone() for one in tensors(output)]
                torch.cuda.synchronize(self.device)
            wrong = self.differs(copies, tensors(self.want))
            if wrong:
                problem = (
                    "wrong for a caller on the current stream: work runs on another stream "
                    f"without waiting for it or being waited for: {_brief(wrong)}"
                )
                break
        self.record("side_stream", problem)

    def stale_weights(self, weights_of: tuple[torch.nn.Module, torch.nn.Module] | None) -> None:
        """Both arms' weights changed in place: the candidate must follow, then follow back."""
        name = "stale_weights"
        pair = weights_of or _modules(self.reference.target, self.candidate)
        if pair is None:
            self.record(name, note="not run: the arms are not modules (weights_of names a pair)")
            return
        weights = _common_weights(*pair)
        if not weights:
            self.record(name, note="not run: the two modules have no weights of the same names")
            return
        if not self.affordable(1):
            self.record(name, note=f"not run: a reference forward takes {self.reference_s:.1f} s")
            return
        saved = [weight.detach().clone() for weight in weights]
        problem = note = ""
        try:
            for weight in weights:
                _set(weight, weight.detach() * WEIGHT_SCALE)
            output = self.call("weights changed in place", self.want)
            want = self.ask_reference("weights changed in place")
            if self.differs(self.want, want) is None:
                note = f"weights times {WEIGHT_SCALE} change the reference within tolerance only"
            wrong = self.differs(output, want)
            if wrong:
                stale = self.differs(output, self.want) is None
                problem = (
                    "after its weights were changed in place the candidate still computes with "
                    "the old ones: packed copies or captured graphs are stale"
                    if stale
                    else "wrong after its weights were changed in place, so some of what it keeps "
                    f"(packed copies, captured graphs) is stale: {_brief(wrong)}"
                )
        finally:
            for weight, old in zip(weights, saved, strict=True):
                _set(weight, old)
        self.record(name, problem, note)

    def afterwards(self) -> None:
        """What must be as it was at the start."""
        edits = [one for one in self.reference.changes() if one not in self._was_intact]
        self.record(
            "reference_unchanged",
            f"the reference was edited meanwhile: {', '.join(edits[:5])}" if edits else "",
        )
        timers = patched_timers()
        self.record(
            "timers",
            f"{', '.join(timers)} replaced: whoever replaces a timer sets its own time"
            if timers
            else "",
        )
        functions = [one for one in replaced_functions(self._functions) if one not in timers]
        self.record(
            "patched_functions",
            f"the candidate replaced {', '.join(functions[:5])}, which the reference uses too"
            if functions
            else "",
        )
        settings = changed(self._state, global_state())
        self.record(
            "global_state",
            f"the candidate changed process-wide settings: {', '.join(settings)}; the reference "
            "is then measured under them"
            if settings
            else "",
        )


_PLAIN: frozenset[type] = frozenset(
    {
        torch.Tensor,
        torch.nn.Parameter,
        tuple,
        list,
        dict,
        bool,
        int,
        float,
        complex,
        str,
        type(None),
    }
)


def _types(output: object) -> set[type]:
    """Types of all containers and leaves of a nested output."""
    found: set[type] = {type(output)}
    if isinstance(output, Mapping):
        children: Sequence[object] = list(output.values())
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        children = [getattr(output, f.name) for f in dataclasses.fields(output)]
    elif isinstance(output, tuple | list):
        children = output
    else:
        children = ()
    return found.union(*(_types(child) for child in children))


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _modules(
    reference: object, candidate: object
) -> tuple[torch.nn.Module, torch.nn.Module] | None:
    candidate = getattr(candidate, "target", candidate)
    if isinstance(reference, torch.nn.Module) and isinstance(candidate, torch.nn.Module):
        return reference, candidate
    return None


def _common_weights(
    reference: torch.nn.Module, candidate: torch.nn.Module
) -> list[torch.nn.Parameter]:
    """Floating parameters of the same name and shape in both, each storage once."""
    mine = dict(candidate.named_parameters())
    found: dict[int, torch.nn.Parameter] = {}
    for name, weight in reference.named_parameters():
        other = mine.get(name, mine.get(f"_orig_mod.{name}"))
        if other is None or other.shape != weight.shape or not weight.is_floating_point():
            continue
        for one in (weight, other):
            found[one.data_ptr()] = one
    return list(found.values())


def _set(weight: torch.nn.Parameter, value: torch.Tensor) -> None:
    with torch.inference_mode() if weight.is_inference() else torch.no_grad():
        weight.copy_(value)


def _brief(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    if comparison.mismatches:
        return comparison.mismatches[0]
    text = f"{comparison.failed:,} of {comparison.total:,} elements out of tolerance"
    return text + (f", {comparison.nonfinite:,} not finite" if comparison.nonfinite else "")


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _noting(what: str) -> Any:
    """Add what was being probed to an exception of an arm."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while probing: {what}")
        raise

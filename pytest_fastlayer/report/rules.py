"""The rule behind each verdict and what helps against it: the sentences of ``explain``, as data."""

from __future__ import annotations

from pytest_fastlayer.records import BaseStatus, Verdict

#: The rule behind each verdict.
RULES: dict[Verdict, str] = {
    Verdict.PASS: "PASS: every element in tolerance, the speedup's interval lies above its bar, "
    "the demanded speedup times 1 + floor, and no regression against the baseline.",
    Verdict.FASTER: "FASTER: as PASS, and faster than the baseline beyond both noise floors.",
    Verdict.BELOW_FLOOR: "BELOW_FLOOR: accurate, but the speedup does not clear its bar, the "
    "demanded speedup times 1 + floor.",
    Verdict.SLOWER: "SLOWER: the drop against the baseline lies wholly beyond the combined noise "
    "floors, after Holm's correction over the cases of the run.",
    Verdict.MORE_MEMORY: "MORE_MEMORY: the candidate's peak memory exceeds the baseline's by more "
    "than the tolerance.",
    Verdict.INCORRECT: "INCORRECT: a single element out of tolerance, or not finite where the "
    "reference is, fails the case; no speed is reported for it.",
    Verdict.DISHONEST: "DISHONEST: a probe caught the candidate doing something other than the "
    "work; no speed is reported for it.",
    Verdict.INCONCLUSIVE: "INCONCLUSIVE: after every extension the interval still straddles its "
    "bar, the demanded speedup times 1 + floor, so neither a pass nor a failure can be claimed.",
    Verdict.UNRESOLVABLE: "UNRESOLVABLE: the work is too short for the timer to resolve.",
    Verdict.NO_BASELINE: "NO_BASELINE: green on its own; there is no stored figure to hold it to.",
    Verdict.STALE_BASELINE: "STALE_BASELINE: the stored figure belongs to another reference, "
    "workload, precision or timing method, so the two cannot be compared.",
    Verdict.OTHER_MACHINE: "OTHER_MACHINE: green on its own; the stored figure is another "
    "device's.",
    Verdict.UNSUPPORTED: "UNSUPPORTED: this machine cannot hold the case or finish it in time.",
    Verdict.ACCURATE: "ACCURATE: accuracy and honesty were checked, and nothing was timed.",
    Verdict.UNJUDGED: "UNJUDGED: something raised before there was a verdict; what had been "
    "measured until then is kept, and neither a pass nor a failure can be claimed.",
}
DIAGNOSTIC_PASS = (
    "PASS: every element in tolerance, honest, and no more memory than stored; a ratio over an "
    "oracle claims no speedup."
)
MORE_TIME = "take more pairs (--fastlayer-pairs) and settle longer (--fastlayer-settle)"
#: What helps against each verdict.
ADVICE: dict[Verdict, tuple[str, ...]] = {
    Verdict.BELOW_FLOOR: (
        "if the floor is high, quieten the machine: close other processes, fix the clocks",
        MORE_TIME,
        "if the floor is low, the candidate is simply not faster",
    ),
    Verdict.SLOWER: (
        "compare the two commits named in the records, and the software that changed between them",
        "if the slowdown is intended, accept it by name (--fastlayer-accept CASE with "
        "--fastlayer-update-baseline)",
    ),
    Verdict.MORE_MEMORY: (
        "look for buffers that outlive the call, and for new intermediate copies",
        "if the memory is well spent, accept it by name (--fastlayer-accept CASE)",
    ),
    Verdict.INCORRECT: (
        "replay the failing seed with the command in the test's failure message",
        "compare precision settings (float32 matmul precision, TF32) of the two arms",
    ),
    Verdict.DISHONEST: (
        "read the probe's message: it says what the candidate did",
        "compute every result anew, from the inputs of that very call, on the stream it runs on",
    ),
    Verdict.INCONCLUSIVE: (
        MORE_TIME,
        "quieten the machine: another process on the device, or clocks that change, widen the "
        "interval",
    ),
    Verdict.UNRESOLVABLE: (
        "time a larger workload, or longer blocks (--fastlayer-block-ms) so that more forwards "
        "fit in one",
    ),
    Verdict.NO_BASELINE: ("store one with --fastlayer-update-baseline",),
    Verdict.STALE_BASELINE: (
        "restore the settings that differ, or accept the new figure by name (--fastlayer-accept "
        "CASE with --fastlayer-update-baseline)",
    ),
    Verdict.OTHER_MACHINE: ("record a baseline on this machine with --fastlayer-update-baseline",),
    Verdict.UNSUPPORTED: (
        "run it on a machine with more memory, or raise --fastlayer-max-case if it is time that "
        "rules it out",
    ),
    Verdict.ACCURATE: ("time it with --fastlayer-bench",),
    Verdict.UNJUDGED: ("mend what the test's failure shows, and measure again",),
}
#: Where a noise floor came from, and what lowers it.
FLOOR_SOURCES = {
    "within_quad": ("the disagreement between the two orders of a quad", MORE_TIME),
    "control": (
        "the A/A control, one arm timed against itself",
        "look for what differs between two equal arms: clocks, other processes, memory layout",
    ),
    "resolution": ("the timer's resolution over a block", "time longer blocks"),
    "min_effect": (
        "the configured minimum effect",
        "lower --fastlayer-min-effect if smaller changes matter to you",
    ),
}

#: The rules of a case whose base was measured: it stands in the place of the stored baseline.
BASE_RULES: dict[Verdict, str] = {
    Verdict.PASS: "PASS: every element in tolerance, the speedup's interval lies above its bar, "
    "the demanded speedup times 1 + floor, and no drop against the base beyond the noise floor of "
    "that comparison.",
    Verdict.FASTER: "FASTER: as PASS, and faster than the base beyond the noise floor of that "
    "comparison.",
    Verdict.SLOWER: "SLOWER: the drop against the base, timed in the same schedule, lies wholly "
    "beyond the noise floor of that comparison, after Holm's correction over the cases of the run.",
}
BASE_ADVICE: dict[Verdict, tuple[str, ...]] = {
    Verdict.SLOWER: (
        "both revisions ran on one machine within the same minutes, so look into the code that "
        "changed between them, and at the routes and launches they took",
        "if the slowdown is intended, accept it by name (--fastlayer-accept CASE)",
    ),
}
#: What became of a base that gives no figure, and what to do about it.
BASE_STATUS: dict[BaseStatus, tuple[str, str]] = {
    "measured": ("it was measured", ""),
    "incorrect": (
        "it is out of tolerance, and a wrong result has no speed",
        "nothing, where this change is what mends it; else name an older base",
    ),
    "missing": (
        "it has no such test or pair",
        "nothing, where this change adds the case",
    ),
    "import_error": (
        "its test module does not import",
        "check that this environment has what that revision needs",
    ),
    "failed": (
        "its test or its candidate raised, or what ran was not that revision's code",
        "run that revision's test alone, in a checkout of its own, to see the whole error",
    ),
    "crashed": (
        "its process ended",
        "run that revision's test alone; a lack of memory for two processes is a common cause",
    ),
    "timeout": ("its process did not answer in time", "allow it more (--fastlayer-base-timeout)"),
    "unsupported": ("it says that this machine cannot hold the case", ""),
    "different": (
        "it is fed other inputs under the same name",
        "nothing, where this change alters the workload on purpose",
    ),
    "unresolvable": (
        "its samples give no ratio",
        "time longer blocks (--fastlayer-block-ms) or more pairs (--fastlayer-pairs)",
    ),
}

"""Is the candidate honest? Probes that a candidate passes by computing what it is asked to.

Public kernel benchmarks were fooled by candidates that return a cached result, leave the work to
another stream or thread, read the reference's memory, edit their judge or patch the timer. Each
probe looks for one of these and says what the candidate did.
"""

from __future__ import annotations

from pytest_fastlayer.probes.after import after_timing
from pytest_fastlayer.probes.inputs import check_inputs, mutated_by
from pytest_fastlayer.probes.run import run_probes
from pytest_fastlayer.probes.watch import Watch

__all__ = ["Watch", "after_timing", "check_inputs", "mutated_by", "run_probes"]

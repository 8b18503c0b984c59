"""From a measured record to admissions: ``python -m fastlayer.admit baselines/DEVICE.json``.

A record is what ``pytest --fastlayer-bench --fastlayer-admit --fastlayer-json=FILE`` writes: for
each case the arm that was chosen, its verdict, and every other variant that was measured.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastlayer.admissions import COMMITTED, Admission, Admissions, Refusal
from fastlayer.cases import case_of
from fastlayer.config import TransformerConfig
from fastlayer.contract import Precision
from fastlayer.dispatch import REFERENCE_ROUTE
from fastlayer.errors import AdmissionError

#: Verdicts that admit: green on their own, whatever was stored before.
_ADMITTING = ("PASS", "FASTER", "NO_BASELINE")


def propose(rows: Admissions, record: str | os.PathLike[str], evidence: str) -> Admissions:
    """``rows`` with what the record file admits and refuses; ``evidence`` is the file cited.

    Raises:
        AdmissionError: the record holds published figures, which are evidence for nobody's device.
    """
    run = json.loads(Path(record).read_text(encoding="utf-8"))
    if run["provenance"] != "measured":
        raise AdmissionError(
            f"{os.fspath(record)}: given {run['provenance']} figures; expected measured ones. "
            "Measure on the device itself."
        )
    for key, measured in run["cases"].items():
        workload = measured.get("workload") or {}
        if not workload or measured.get("route") is None:
            continue
        case = case_of(TransformerConfig.of(SimpleNamespace(**workload)))
        if case is None:
            continue
        where = (run["device"]["name"], Precision(**measured["precision"]), case)
        rows = _case(rows, where, measured, f"{evidence}#{key}")
    return rows


def _case(
    rows: Admissions, where: tuple[str, Precision, int], measured: Mapping[str, Any], evidence: str
) -> Admissions:
    route, launch = measured["route"], measured.get("launch") or {}
    verdict = measured["verdict"]
    if verdict in _ADMITTING and route != REFERENCE_ROUTE:
        rows = rows.admit(Admission(*where, route, launch, evidence))
    elif route != REFERENCE_ROUTE:
        rows = rows.refuse(Refusal(*where, route, launch, _reason(measured)))
    arms = [(*parse_variant(arm["name"]), arm) for arm in measured.get("variants", ())]
    # Side by side in the same screening, where the admitted route took part in it.
    admitted = next((arm for *named, arm in arms if named == [route, launch]), measured)
    for name, options, arm in arms:
        if (name, options) == (route, launch):
            continue
        reason = _reason(arm)
        if arm["verdict"] in _ADMITTING:
            reason = f"passed at {_speed(arm)}, the admitted at {_speed(admitted)}"
        rows = rows.refuse(Refusal(*where, name, options, reason))
    return rows


def parse_variant(name: str) -> tuple[str, dict[str, Any]]:
    """Route and launch of a variant named ``route option=value option=value``."""
    route, *options = name.split()
    launch: dict[str, Any] = {}
    for option in options:
        key, _, text = option.partition("=")
        try:
            launch[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):  # a bare word, e.g. execution=graph
            launch[key] = text
    return route, launch


def _reason(arm: Mapping[str, Any]) -> str:
    return f"{arm['verdict']}: {arm.get('reason') or 'no reason recorded'}"


def _speed(arm: Mapping[str, Any]) -> str:
    timing = arm.get("timing") or {}
    if "speedup" not in timing:
        return "no recorded speed"
    return f"{1e6 * timing['candidate_s']:,.1f} us ({timing['speedup']:.2f}x)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fastlayer.admit", description=__doc__)
    parser.add_argument("record", type=Path, help="a measured record or baseline file")
    parser.add_argument("--evidence", help="path to cite instead of the record's own")
    parser.add_argument("--into", type=Path, default=COMMITTED, help="admissions file to update")
    given = parser.parse_args(arguments)
    before = Admissions.load(given.into) if given.into.exists() else Admissions()
    after = propose(before, given.record, given.evidence or given.record.as_posix())
    after.save(given.into)
    print(f"{given.into}: {len(after.admitted)} admitted, {len(after.refused)} refused")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

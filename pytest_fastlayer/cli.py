"""``fastlayer-gate``: read, compare and store run records without running a test.

The gate is imported where it judges: it brings scipy, which the other commands need not wait for.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fastlayer import baselines, comparability
from pytest_fastlayer.baselines import BaselineError, BaselineNotFoundError, Merge, shown
from pytest_fastlayer.records import (
    GREEN,
    NOTICE,
    CaseRecord,
    RunRecord,
    Verdict,
    json_schema,
)
from pytest_fastlayer.report import explain, github, markdown, terminal, text
from pytest_fastlayer.report.table import label

if TYPE_CHECKING:
    from pytest_fastlayer.gate import Policy

OK = 0
OUTDATED = 1
USAGE = 2
NOT_COMPARABLE = 13
MISSING_BASELINE = 14

EXIT_CODES = """\
exit codes:
  0   no regression (update: stored; others: done)
  1   figures --check: a table or picture is out of date
  2   usage error, or a record that cannot be read
  10  slower than the baseline, more memory, or below the noise floor (update: refused,
      also where a case is green by its base alone and the stored figure is better,
      or where it was measured before the stored one; --accept CASE overrides)
  11  incorrect or dishonest
  12  inconclusive, unresolvable or unjudged
  13  not comparable: stored for another reference, workload or method, or a stored
      figure that NEW lacks; another device's with --require-baseline
  14  missing baseline: OLD does not exist, or lacks the case with --require-baseline
When several apply, the first of 11, 10, 12, 13, 14.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see ``fastlayer-gate --help``)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse: 0 after --help, 2 after a usage error
        return stop.code if isinstance(stop.code, int) else USAGE
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except (BaselineError, OSError, ValueError, ImportError) as error:
        print(f"fastlayer-gate: error: {error}", file=sys.stderr)
        return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastlayer-gate",
        description="Read, compare and store the records that pytest --fastlayer-bench writes.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(
        name: str, command: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(command=command)
        return sub

    compare = add("compare", _compare, "judge a run against a baseline or an earlier run")
    compare.add_argument("old", metavar="OLD", help="baseline, or folder of <device>.json files")
    compare.add_argument("new", metavar="NEW", help="record of the run to judge")
    compare.add_argument("--junit", metavar="FILE", help="also write JUnit XML to this file")
    compare.add_argument(
        "--partial", action="store_true", help="NEW covers only some of the stored cases"
    )
    compare.add_argument(
        "--require-baseline",
        action="store_true",
        help="a case without a comparable stored figure fails",
    )
    compare.add_argument("--alpha", type=float, default=0.05, help="error rate of the run")
    compare.add_argument("--min-speedup", type=float, default=1.0, metavar="RATIO")
    compare.add_argument("--accept", action="append", default=[], metavar="CASE")
    _add_format(compare)

    show = add("show", _show, "print a record")
    show.add_argument("record", metavar="FILE")
    _add_format(show)

    add("schema", _schema, "print the JSON schema of a record")

    reason = add("explain", _explain, "say why a case has its verdict, and what to try")
    reason.add_argument("record", metavar="RECORD")
    reason.add_argument("case", metavar="CASE", help="name of the case, as the record has it")

    update = add("update", _update, "store runs in their baselines, all or nothing for each run")
    update.add_argument("runs", nargs="+", metavar="RUN")
    update.add_argument(
        "--baseline", required=True, metavar="PATH", help="file, or folder of <device>.json files"
    )
    update.add_argument("--accept", action="append", default=[], metavar="CASE")
    update.add_argument(
        "--complete",
        action="store_true",
        help="each run covered every case: stored cases it lacks are removed",
    )

    report = add("report", _report, "write one self-contained HTML report of several records")
    report.add_argument("records", nargs="+", metavar="FILE")
    report.add_argument("-o", "--output", default="report.html", metavar="HTML")

    figures = add("figures", _figures, "write a README's tables and pictures from stored baselines")
    figures.add_argument("records", nargs="+", metavar="FILE")
    figures.add_argument(
        "--document",
        action="append",
        default=[],
        metavar="MD",
        help="renew the tables between <!-- table:begin FILE --> and <!-- table:end --> in it",
    )
    figures.add_argument("--pictures", metavar="DIR", help="write two SVG pictures a record there")
    figures.add_argument(
        "--check", action="store_true", help="write nothing; 1 when something is out of date"
    )
    return parser


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        choices=sorted(FORMATS),
        default="table",
        help="github: table, annotations, and the step summary where there is one",
    )
    parser.add_argument(
        "--markdown", action="store_const", const="markdown", dest="format", help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="colours of the table"
    )


# --------------------------------------------------------------------------------------------------
# Commands


def _compare(arguments: argparse.Namespace) -> int:
    from pytest_fastlayer import gate

    new = baselines.load(arguments.new)
    path = baselines.find(arguments.old, new.device)
    try:
        old = baselines.load(path)
    except BaselineNotFoundError as error:
        print(f"fastlayer-gate: error: {error}", file=sys.stderr)
        return MISSING_BASELINE
    unknown = sorted(set(arguments.accept) - set(new.cases))
    if unknown:
        raise BaselineError(f"--accept: {', '.join(map(shown, unknown))}: not in {arguments.new}")
    policy = gate.Policy(
        alpha=arguments.alpha,
        min_speedup=arguments.min_speedup,
        require_baseline=arguments.require_baseline,
        family_size=max(1, sum(case.timing is not None for case in new.cases.values())),
        accepted=frozenset(arguments.accept),
    )
    judged = judge_against(new, old, policy, str(path))
    lost = [] if arguments.partial else _lost(judged, old)
    if arguments.junit:
        from pytest_fastlayer.report import junit

        Path(arguments.junit).write_text(junit.render(judged), encoding="utf-8")
    FORMATS[arguments.format](judged, _color(arguments))
    if lost:
        print(
            f"fastlayer-gate: stored in {path} but not timed in {arguments.new}: "
            f"{text.listing(lost)}; measure them, or say --partial",
            file=sys.stderr,
        )
    code = gate.exit_code([case.verdict for case in judged.cases.values()], policy)
    return NOT_COMPARABLE if lost and code in (OK, MISSING_BASELINE) else code


def judge_against(new: RunRecord, old: RunRecord, policy: Policy, path: str) -> RunRecord:
    """``new`` with every case judged against ``old``, Holm-corrected over the run.

    A base that the run measured decides as it does in the run itself.
    """
    from pytest_fastlayer import gate
    from pytest_fastlayer.base import judging

    def judged(name: str, case: CaseRecord) -> CaseRecord:
        if case.timing is None and case.verdict is not Verdict.ACCURATE:
            return case  # settled when it was measured; there is no figure to judge anew
        alone = gate.judge(
            case,
            comparability.as_of(old, name),
            name=name,
            device=new.device,
            policy=policy,
            baseline_path=path,
            software=comparability.as_of(new, name).software,
        )
        if case.base is None:
            return alone
        return judging.settle(alone, case.base, name=name, policy=policy)

    cases = {name: judged(name, case) for name, case in new.cases.items()}
    return new.model_copy(update={"cases": gate.judge_run(cases, policy, judging.drop)})


def _lost(new: RunRecord, old: RunRecord) -> list[str]:
    """Cases with a stored figure that the new run gives neither a figure nor a failure."""
    settled = {
        name
        for name, case in new.cases.items()
        if case.timing is not None or case.verdict not in (Verdict.ACCURATE, Verdict.UNSUPPORTED)
    }
    return [n for n, case in old.cases.items() if case.timing is not None and n not in settled]


def _show(arguments: argparse.Namespace) -> int:
    FORMATS[arguments.format](baselines.load(arguments.record), _color(arguments))
    return OK


def _schema(arguments: argparse.Namespace) -> int:
    print(json.dumps(json_schema(), indent=2, sort_keys=True))
    return OK


def _explain(arguments: argparse.Namespace) -> int:
    record = baselines.load(arguments.record)
    case = record.cases.get(arguments.case)
    if case is None:
        names = ", ".join(map(shown, list(record.cases)[:30])) or "none"
        raise BaselineError(
            f"{arguments.record}: no case {shown(arguments.case)}; its cases are {names}"
        )
    print("\n".join(explain.explain(arguments.case, case, record.device)))
    return OK


def _update(arguments: argparse.Namespace) -> int:
    """All runs are merged before the first file is written, so a refusal changes nothing."""
    stored: dict[Path, RunRecord] = {}
    accept = frozenset(arguments.accept)
    loaded = [(source, baselines.load(source)) for source in arguments.runs]
    unknown = sorted(accept.difference(*(run.cases for _, run in loaded)))
    if unknown:
        raise BaselineError(f"--accept: {', '.join(map(shown, unknown))}: in none of the runs")
    targets = {source: baselines.find(arguments.baseline, run.device) for source, run in loaded}
    with ExitStack() as stack:
        # In one order for everybody, so that two updates cannot wait for each other.
        for path in sorted(set(targets.values())):
            stack.enter_context(baselines.locked(path))
        for source, run in loaded:
            path = targets[source]
            old = stored.get(path) or (baselines.load(path) if path.exists() else None)
            merge = baselines.merge(
                old, run, accept=accept & set(run.cases), selected_all=arguments.complete
            )
            print(f"{source} -> {path}: {merge.summary()}")
            if merge.refused:
                return _refuse(run, old, merge)
            stored[path] = merge.record
        for path, record in stored.items():
            baselines.save(record, path)
    return OK


def _refuse(run: RunRecord, old: RunRecord | None, merge: Merge) -> int:
    from pytest_fastlayer import gate

    verdicts = []
    for name in merge.refused:
        case = run.cases[name]
        is_green = case.verdict in GREEN | NOTICE
        said, why = case.verdict.value, text.plain(case.reason, 400)
        if old is not None and name in merge.older:
            now, then = (baselines.measured_at(record.cases[name], record) for record in (run, old))
            said += ", but older than stored"
            why = (
                f"measured {now}, the stored figure {then}: give a newer record, or put the older "
                f"figure back with --accept {text.plain(name)}"
            )
        elif is_green:  # by its base alone, while the stored figure is better
            said += ", but worse than stored"
        print(f"refused {label(name, case)}: {said}: {why}", file=sys.stderr)
        verdicts.append(Verdict.SLOWER if is_green else case.verdict)
    return gate.exit_code(verdicts, gate.Policy())


def _report(arguments: argparse.Namespace) -> int:
    from pytest_fastlayer.report import html

    records = [baselines.load(source) for source in arguments.records]
    Path(arguments.output).write_text(html.render(records), encoding="utf-8")
    print(f"wrote {arguments.output}")
    return OK


def _figures(arguments: argparse.Namespace) -> int:
    from pytest_fastlayer.report import figures

    if not arguments.document and arguments.pictures is None:
        raise ValueError("nothing to write: give --document MD, --pictures DIR, or both")
    folder = Path(arguments.pictures) if arguments.pictures else None
    files = figures.expected(
        {Path(source): baselines.load(source) for source in arguments.records},
        [Path(document) for document in arguments.document],
        folder,
    )
    old = figures.outdated(files)
    for path in old:
        if not arguments.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8", newline="\n")
        print(f"out of date: {path}" if arguments.check else f"wrote {path}")
    if not old:
        print(f"{len(files)} files are what the records say")
    return OUTDATED if old and arguments.check else OK


# --------------------------------------------------------------------------------------------------
# Formats


def _color(arguments: argparse.Namespace) -> bool:
    if arguments.color == "auto":
        return sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return bool(arguments.color == "always")


def _print_table(run: RunRecord, color: bool) -> None:
    print("\n".join(terminal.summary(run, color)))


def _print_markdown(run: RunRecord, color: bool) -> None:
    print(markdown.table(run), end="")


def _print_json(run: RunRecord, color: bool) -> None:
    print(run.to_json(), end="")


def _print_github(run: RunRecord, color: bool) -> None:
    _print_table(run, color)
    print("\n".join(github.commands(run)))
    github.write_summary(run)


FORMATS: dict[str, Callable[[RunRecord, bool], None]] = {
    "table": _print_table,
    "markdown": _print_markdown,
    "json": _print_json,
    "github": _print_github,
}


if __name__ == "__main__":
    sys.exit(main())

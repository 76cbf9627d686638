"""Report: what became of each definition, a summary of all verdicts of a run, and the table that ends a run."""

import io
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from enum import StrEnum
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypedDict

from rich.console import Console
from rich.table import Table

from traceproof.digests import code_digest, digest_file, digest_json
from traceproof.errors import TraceproofError
from traceproof.files import read_sealed, sealed, write_text
from traceproof.reasons import Error, Grade, Skip, Verdict
from traceproof.run import schema
from traceproof.run.cache import Cache, key_of_file
from traceproof.run.known import Known, read_known
from traceproof.stacks import STACK_OF, TRUTHS, distribution
from traceproof.text import printable

WIDTH = 118
DEFINITIONS_SHOWN = 100  # definitions with findings that are listed under the table
SHOWN = 20  # findings shown in full, spread evenly over definitions
NO_ORACLE = str(Skip.NO_ORACLE)  # skip reason: nobody judged the numbers, which is no pass
KINDS = ("new", "known", "unexpected")  # of findings
SUMMARY, VERDICTS = "summary.json", "verdicts"  # a run's file and folder
MADE_OF = "made_of"  # key of a summary: digests of its verdict files, by name
LIMITED = frozenset({Error.TIMEOUT, Error.MEMORY})  # new findings of these reasons are computed again
FIELDS = ("definition", "op_type", "case", "implementation", "output", "verdict", "reason", "message", "repeat")


class Conclusion(StrEnum):
    """What became of a definition; where several fit, the first in this order counts."""

    WRONG = "wrong"
    UNVERIFIED = "unverified"
    KNOWN = "known"
    RELAXED = "relaxed"
    AGREED = "agreed"
    CONSISTENT = "consistent"
    UNCONFIRMED = "unconfirmed"
    SCALED_DOWN = "scaled_down"
    RIGHT = "right"
    NOT_RUN = "not_run"


# Words for the numbers of definitions with each conclusion, in the order of the report.
WORDS: Mapping[Conclusion, str] = {
    Conclusion.RIGHT: "right",
    Conclusion.AGREED: "agreed by a ground truth and their own float64, no oracle",
    Conclusion.RELAXED: "accepted by your tolerance, not proved",
    Conclusion.KNOWN: "with known findings",
    Conclusion.WRONG: "with new findings",
    Conclusion.CONSISTENT: "not verified: consistent with their own float64 alone",
    Conclusion.UNCONFIRMED: "not verified: right but for a constant that the reference alone states",
    Conclusion.UNVERIFIED: "not verified: no oracle",
    Conclusion.SCALED_DOWN: "too large here, judged by a scaled-down definition alone",
    Conclusion.NOT_RUN: "not runnable here",
}
COMPARED = frozenset(Conclusion) - {Conclusion.UNVERIFIED, Conclusion.SCALED_DOWN, Conclusion.NOT_RUN}
OF_GRADE = {
    Grade.AGREED: Conclusion.AGREED,
    Grade.CONSISTENT: Conclusion.CONSISTENT,
    Grade.SCALED_DOWN: Conclusion.SCALED_DOWN,
}


def compared(conclusions: Iterable[str]) -> bool:
    """Whether anything was compared at all."""
    return not COMPARED.isdisjoint(conclusions)


def proved(conclusions: Collection[str]) -> bool:
    """Whether anything was compared, and every definition with more than its own reference."""
    return compared(conclusions) and not {Conclusion.CONSISTENT, Conclusion.UNCONFIRMED} & set(conclusions)


def sentence(summary: Mapping[str, Any]) -> str:
    """The run's sentence: `VERIFIED: 48 definitions, 41 right, 6 with known findings, 1 not runnable here`."""
    conclusions = [one["conclusion"] for one in summary["definitions"].values()]
    counts = Counter(conclusions)
    parts = [f"{counts[one]} {words}" for one, words in WORDS.items() if counts[one]]
    definitions = f"{len(conclusions)} definition{'' if len(conclusions) == 1 else 's'}"
    verdict = "VERIFIED" if summary["verified"] else "NOT VERIFIED"
    text = f"{verdict}: {', '.join([definitions, *parts])}"
    if compared(conclusions):
        return text
    groups = [one for one in summary["groups"] if one["implementation"] == schema.REFERENCE]
    reasons = _counted(sum((Counter(one["skips"]) for one in groups), Counter())) or "the selection has no case"
    size = " in its own size" if any(one[Verdict.PASS] for one in groups) else ""  # scaled-down ones passed
    return f"{text}; nothing was compared{size}: {reasons}"


def _counted(skips: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in skips.items())


NO_TRUTH, ERROR, UNREADABLE, RELAXED = "no_truth", "error", "unreadable", "relaxed"
# Why a definition was compared with no ground truth, in words; of several reasons the first is reported.
WHY: Mapping[str, str] = {
    RELAXED: "judged by a tolerance of your own, which proves nothing",
    UNREADABLE: "the definition cannot be read",
    ERROR: "ended in an error",
    Skip.NO_REFERENCE: "it has no reference",
    Skip.DOES_NOT_FIT: "larger than limits.memory_gb",
    Skip.BLOB_MISSING: "files of its workloads are missing",
    Skip.NEEDS_SM: "needs a GPU of another compute capability",
    Skip.NO_CUDA: "needs a GPU",
    Skip.API_ABSENT: "the installed version lacks the function",
    Skip.PACKAGE_ABSENT: "the package is not installed",
    Skip.DTYPE_UNSUPPORTED: "its dtype is not supported",
    Skip.UNSUPPORTED: "its layout, sizes or options are not supported",
    Skip.NO_INPUTS: "no inputs can be made for it",
    Skip.NO_ORACLE: "no oracle is known for it",
    Skip.UNJUDGED: "nobody judged one of its outputs",
    Skip.NO_ADAPTER: "no ground truth is known for it",
    NO_TRUTH: "no ground truth is known for it",
}
NAMED = 2  # definitions of an op_type that are named; more are counted
# Of a definition's rows, the worst; skip only if nothing passed, scaled_down if the scaled-down form passed.
OUTCOMES_WORST_FIRST = (Verdict.ERROR, Verdict.FAIL, Skip.NO_ORACLE, Grade.SCALED_DOWN, Verdict.PASS, Verdict.SKIP)


class DefinitionResult(TypedDict):
    """A definition's result, from all its rows."""

    op_type: str
    verdict: str  # one of OUTCOMES_WORST_FIRST
    conclusion: str  # a Conclusion's value
    grade: str | None  # how strong its proof is; None: it has none
    wrong: bool  # whether its reference failed
    truths: list[str]  # ground truths that were compared with it
    unmet: str  # why there was none, a key of WHY; empty: there was one
    scaled_down: str  # axes that were smaller in what was judged; empty: none
    unconfirmed: str  # constants that only the reference states, if they lower the grade


def concluded(noted: Sequence[tuple[schema.VerdictRow, str | None]]) -> DefinitionResult:
    """The result of one definition, from its rows, each with its kind of finding (None: no finding)."""
    rows = [row for row, _ in noted]
    full_size = [row for row in rows if not row.scaled_down]  # scaled-down rows are not about its own size
    cases, reasons = _compared(full_size)
    judged = cases.get(schema.REFERENCE, set())
    proved = any(judged & cases.get(name, set()) for name in TRUTHS)
    wrong = any(row.implementation == schema.REFERENCE and row.bad for row in rows)
    scaled_down = [row.scaled_down for row in rows if row.grade is Grade.SCALED_DOWN]
    unconfirmed = [row.constants for row in full_size if row.grade is Grade.CONSISTENT and row.constants]
    shadowed = {row.grade for row in full_size if row.against == schema.SHADOW and row.grade is not None}
    grade: Grade | None = Grade.PROVED if proved else Grade.CHECKED if judged else None
    if scaled_down and not wrong:  # at its own size only edge cases were judged
        grade = Grade.SCALED_DOWN
    elif unconfirmed and not wrong:
        grade = Grade.CONSISTENT
    elif wrong or any(row.unjudged for row in full_size):  # nobody judged one of its outputs: nothing is proved
        grade = None
    elif shadowed:  # the best grade of its rows counts
        grade = Grade.AGREED if Grade.AGREED in shadowed else Grade.CONSISTENT
    scaled = Grade.SCALED_DOWN
    verdicts = {Skip.NO_ORACLE if one.unjudged else scaled if one.grade is scaled else one.verdict for one in rows}
    conclusions = {_mark(row, finding) for row, finding in noted}
    return DefinitionResult(
        op_type=rows[0].op_type,
        verdict=str(next(one for one in OUTCOMES_WORST_FIRST if one in verdicts)),
        conclusion=str(next((one for one in Conclusion if one in conclusions), Conclusion.NOT_RUN)),
        grade=None if grade is None else str(grade),
        wrong=wrong,
        truths=[name for name in TRUTHS if cases.get(name)],
        unmet="" if proved else str(next((one for one in WHY if one in reasons), NO_TRUTH)),
        scaled_down=scaled_down[-1] if scaled_down and grade is not None else "",
        unconfirmed=unconfirmed[-1] if unconfirmed and grade is Grade.CONSISTENT else "",
    )


def _compared(rows: Iterable[schema.VerdictRow]) -> tuple[dict[str, set[str]], set[str]]:
    """Cases that were compared, by implementation; and why ground truths were not (keys of WHY)."""
    cases: dict[str, set[str]] = {}
    reasons: set[str] = set()
    for row in rows:
        skipped = row.verdict == Verdict.SKIP and row.implementation in TRUTHS
        if row.tolerance is not None:
            reasons.add(RELAXED)
        # rows about conduct alone compare nothing
        elif row.verdict in {Verdict.PASS, Verdict.FAIL} and row.output != schema.WHOLE:
            cases.setdefault(row.implementation, set()).add(str(row.case))
        elif row.case is None:
            reasons.add(UNREADABLE)
        elif skipped or row.unjudged or row.reason == Skip.NO_REFERENCE:
            reasons.add(str(row.reason))
        elif row.verdict == Verdict.ERROR or (row.verdict == Verdict.FAIL and row.implementation in TRUTHS):
            reasons.add(ERROR)
    return cases, reasons


def _mark(row: schema.VerdictRow, finding: str | None) -> Conclusion | None:
    """The conclusion that this row alone would give; None: it gives none."""
    if finding is not None:
        news = Conclusion.UNVERIFIED if row.unjudged else Conclusion.WRONG
        return Conclusion.KNOWN if finding == "known" else news
    if row.implementation != schema.REFERENCE:
        return None
    if row.grade in OF_GRADE:
        return Conclusion.UNCONFIRMED if row.constants else OF_GRADE[row.grade]
    if row.verdict == Verdict.PASS and not row.scaled_down:
        return Conclusion.RIGHT if row.tolerance is None else Conclusion.RELAXED
    return Conclusion.NOT_RUN if row.verdict == Verdict.SKIP else None


def sentences(summary: Mapping[str, Any]) -> Iterator[str]:
    """Sentences at a run's end: what was proved, on which machine, against what, and what was out of reach."""
    definitions: Mapping[str, DefinitionResult] = summary["definitions"]
    if not definitions:
        return
    total, results = len(definitions), list(definitions.values())
    labels = (f"{TRUTHS[name].label} {version or ''}".strip() for name, version in summary["truths"].items())
    truths = ", ".join(labels)
    where = f"on SM {summary['capability']} ({summary['device']})" if summary["capability"] else "on the CPU"
    grades = Counter(one["grade"] for one in results if not one["unconfirmed"])
    unconfirmed = {name: one["unconfirmed"] for name, one in definitions.items() if one["unconfirmed"]}
    scaled_down = {name: one["scaled_down"] for name, one in definitions.items() if one["scaled_down"]}
    unproved_results = [one for one in results if one["grade"] is None and not one["wrong"]]
    relaxed = sum(one["unmet"] == RELAXED for one in unproved_results)
    proofs = {
        "against the float64 oracle alone": grades[Grade.CHECKED],
        "agreed without an oracle": grades[Grade.AGREED],
        "consistent with float64 alone": grades[Grade.CONSISTENT],
        "but for a constant that the reference alone states": len(unconfirmed),
        "by scaled-down definitions alone": len(scaled_down),
    }
    lacking = {
        "with findings": sum(one["wrong"] for one in results),
        "accepted by your tolerance": relaxed,
        "not run": len(unproved_results) - relaxed,
    }
    counts, missing = ([f"{count} {of}" for of, count in one.items() if count] for one in (proofs, lacking))
    told = ", ".join([f"{grades[Grade.PROVED]} of {total} definitions against a ground truth", *counts])
    unproved = f"; not proved: {', '.join(missing)}" if missing else ""
    yield f"Proved {where}{f' with {truths}' if truths else ''}: {told}{unproved}."
    if names := ", ".join(sorted(limited(summary))):
        yield f"Ran into a limit of time or memory, and computed again by the next run alone: {names}."
    if any(one["unmet"] for one in results):
        yield f"Without a ground truth here: {'; '.join(_unreached(definitions))}."
    yield from (f"Scaled down, {name}: {told}." for name, told in scaled_down.items())
    should = "its description should state it"
    yield from (f"Not proved: {name}, {told}; {should}." for name, told in unconfirmed.items())


def _unreached(definitions: Mapping[str, DefinitionResult]) -> Iterator[str]:
    """Per reason, the op_types or the definitions that met no ground truth."""
    totals = Counter(one["op_type"] for one in definitions.values())
    by_words: dict[str, dict[str, list[str]]] = {}
    for reason, words in WHY.items():
        for name, one in ((name, one) for name, one in definitions.items() if one["unmet"] == reason):
            by_words.setdefault(words, {}).setdefault(one["op_type"], []).append(name)

    def described(op_type: str, names: list[str]) -> str:
        share = f"all {len(names)}" if len(names) == totals[op_type] else f"{len(names)} of {totals[op_type]}"
        return f"{share} of {op_type}" if len(names) > NAMED else ", ".join(names)

    for words, members in by_words.items():
        yield f"{', '.join(described(*item) for item in members.items())} ({words})"


def report(
    verdicts: Sequence[Path],
    summary: Path,
    *,
    known: Path | None,
    stacks: Sequence[Mapping[str, Any]] = (),
    cache: Path | None = None,
) -> dict[str, Any]:
    """Write summary.json from the verdict files and the environments' records, and return its content.

    It holds the digests of the verdict files; of files whose summary the `cache` has, rows are not read again.
    Raises TraceproofError: known.yaml or a verdict file can not be used, or the disk is full.
    """
    known_findings = read_known(known)
    digests = {path.name: _digest_of(path) for path in verdicts}
    common = digest_json([code_digest("run"), list(stacks), digest_file(known) if known is not None else None])
    keys = {path: digest_json([common, digests[path.name]]) for path in verdicts}
    cached: dict[str, Any] = {}
    with ExitStack() as stack:
        rows_cache = stack.enter_context(Cache(cache)) if cache is not None else None
        if rows_cache is not None and cache is not None:
            files = {path: key_of_file(path, cache) for path in verdicts}
            cached = rows_cache.get([*keys.values(), *files.values()])
            changed = [path for path, key in files.items() if cached.get(key) != digests[path.name]]
            _make_again(changed, "verdicts were changed after they were written, or the cache that knew is lost")
        unknown = {key: path for path, key in keys.items() if key not in cached}
        computed = {key: summarise(schema.each_row(path), known_findings, stacks) for key, path in unknown.items()}
        if rows_cache is not None and computed:
            rows_cache.put(computed)
    parts = [{**cached, **computed}[key] for key in keys.values()]
    for path, part in zip(verdicts, parts, strict=True):
        if limited(part):
            write_text(path.parents[1] / schema.RETRY / path.stem, str(path.stat().st_mtime_ns))
    names = [name for part in parts for name in part["definitions"]]
    if parts and len(set(names)) == len(names):
        value = joined(parts)
    else:  # an unreadable file may have another one's name
        value = summarise(chain.from_iterable(map(schema.each_row, verdicts)), known_findings, stacks)
    value[MADE_OF] = digests
    write_text(summary, sealed(json.dumps(value, ensure_ascii=False, allow_nan=False)))
    return value


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The summary of several verdict files, from the summary of each; no definition may be in two."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for group in (group for part in parts for group in part["groups"]):
        names = group["op_type"], group["implementation"]
        total = groups.setdefault(names, group)
        if total is not group:
            counts = {key: total[key] + value for key, value in group.items() if not isinstance(value, str | dict)}
            skips = dict(sorted((Counter(total["skips"]) + Counter(group["skips"])).items()))
            groups[names] = {**total, **counts, "skips": skips}
    findings = {kind: [found for part in parts for found in part["findings"][kind]] for kind in KINDS}
    definitions = dict(sorted(item for part in parts for item in part["definitions"].items()))
    truths = {name: version for part in parts for name, version in part["truths"].items()}
    machine = {"device": parts[0]["device"], "capability": parts[0]["capability"]}  # the same for all parts
    return _summary(definitions, [groups[names] for names in sorted(groups)], findings, machine, truths)


def _summary(
    definitions: Mapping[str, DefinitionResult],
    groups: Sequence[Mapping[str, Any]],
    findings: Mapping[str, Sequence[Mapping[str, Any]]],
    machine: Mapping[str, Any],
    truths: Mapping[str, str | None],
) -> dict[str, Any]:
    conclusions = [one["conclusion"] for one in definitions.values()]
    return {
        "verified": proved(conclusions) and not findings["new"] and not findings["unexpected"],
        **machine,
        "truths": {name: truths[name] for name in TRUTHS if name in truths},
        "definitions": definitions,
        "groups": groups,
        "findings": findings,
    }


def limited(summary: Mapping[str, Any]) -> set[str]:
    """Definitions with new findings that are due to a limit of time or memory."""
    return {one["definition"] for one in summary["findings"]["new"] if one["reason"] in LIMITED}


def read_summary(path: Path) -> dict[str, Any]:
    """A run's summary. Raises TraceproofError: it is damaged, or of other verdict files; these are removed."""
    # a family's summary lies in a folder below the run's
    run = path.parent if path.name == SUMMARY else path.parent.parent
    content = read_sealed(path)
    made_of = {run / VERDICTS / name: digest for name, digest in content[MADE_OF].items()}
    changed = [verdicts for verdicts, digest in made_of.items() if _digest_of(verdicts) != digest]
    if changed:
        path.unlink(missing_ok=True)
    _make_again(changed, f"{path} is not of the verdicts that are there")
    return content


def _digest_of(verdicts: Path) -> str:
    """Digest of a verdict file; empty if it is missing or can not be read, so it differs from that of any file."""
    with suppress(OSError):
        return digest_file(verdicts)
    return ""


def _make_again(verdicts: Sequence[Path], what: str) -> None:
    """Remove verdict files, and their plans if damaged. Raises TraceproofError, `what`: if there are any."""
    for path in verdicts:
        path.unlink(missing_ok=True)
        with suppress(TraceproofError):  # reading removes a damaged plan
            schema.OpTypePlan.read(path.parents[1] / "cases" / f"{path.stem}.json")
    if verdicts:
        raise TraceproofError(what, problems=[str(path) for path in verdicts[:SHOWN]], todo=schema.AGAIN)


def summarise(
    rows: Iterable[schema.VerdictRow], known: Known, stacks: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The summary of rows: counts per op_type and implementation, results of definitions, findings by kind.

    Raises TraceproofError: known.yaml names a package that an implementation's stack does not hold.
    """
    versions = {str(record["stack"]): record["versions"] for record in stacks}
    groups: dict[tuple[str, str], list[tuple[schema.VerdictRow, str | None]]] = {}
    definitions: dict[str, list[tuple[schema.VerdictRow, str | None]]] = {}
    findings: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for row in rows:
        kind = _kind(row, known, versions)
        definitions.setdefault(row.definition, []).append((row, kind))
        groups.setdefault((row.op_type, row.implementation), []).append((row, kind))
        if kind is not None:
            findings[kind].append({name: getattr(row, name) for name in FIELDS})
    results = {name: concluded(definitions[name]) for name in sorted(definitions)}
    gpu = next((one for one in stacks if one.get("device_type") == "cuda"), {})
    machine = {"device": gpu.get("device"), "capability": gpu.get("capability")}
    stack_of_truth = {name: STACK_OF[name] for one in results.values() for name in one["truths"]}
    truths = {name: versions.get(stack, {}).get(distribution(stack)) for name, stack in stack_of_truth.items()}
    return _summary(results, [_group(groups[names]) for names in sorted(groups)], findings, machine, truths)


def _group(noted: Sequence[tuple[schema.VerdictRow, str | None]]) -> dict[str, Any]:
    """Counts over the rows of one implementation and op_type, each row with its kind of finding."""
    rows = [row for row, _ in noted]
    verdicts = Counter(str(row.verdict) for row in rows)
    skips = Counter(str(row.reason) for row in rows if row.verdict == Verdict.SKIP)
    return {
        "op_type": rows[0].op_type,
        "implementation": rows[0].implementation,
        "definitions": len({row.definition for row in rows}),
        "cases": len({(row.definition, str(row.case)) for row in rows}),
        **{name: verdicts[name] for name in Verdict},
        "known": sum(kind == "known" for _, kind in noted),
        NO_ORACLE: sum(row.unjudged for row in rows),
        "skips": dict(sorted(skips.items())),
    }


def _kind(row: schema.VerdictRow, known: Known, stacks: Mapping[str, Mapping[str, str]]) -> str | None:
    """A row's kind of finding: "new", "known", "unexpected" (not as known.yaml says), or None."""
    if row.tolerance is not None:  # known.yaml is about the calibrated gates
        return "new" if row.bad else None
    if row.verdict == Verdict.SKIP and not row.unjudged:
        return None  # A machine without the GPU that showed the finding does not refute it.
    # Versions that the row was made with, overridden by this run's: the row may be an earlier one's.
    versions = dict(row.versions or {})
    for implementation in row.implementation.split(schema.PAIR):
        versions |= stacks.get(schema.environment_of(implementation), {})
    entry = known.entry(row, versions)
    # An entry "no oracle" also covers a definition whose float64 shadow was computed.
    shadowed = row.grade is Grade.CONSISTENT and not row.constants
    alone = row.changed(verdict=Verdict.SKIP, reason=Skip.NO_ORACLE) if shadowed else row
    if entry is not None and entry.expects(alone):
        return "known"
    if entry is not None and entry.stands(versions):
        return "unexpected"
    return "new" if row.bad or row.unjudged else None


def table(summary: Mapping[str, Any]) -> str:
    """The table, findings and sentences, as text for a terminal or a log."""
    console = plain()
    nobody = ["no oracle"] if any(group[NO_ORACLE] for group in summary["groups"]) else []
    columns = ("definitions", "cases", "pass", "fail", "error", "known", *nobody, "skip")
    grid = headed("Verdicts (one row per case output)", ("op_type", "implementation"), columns, "skipped because")
    idle: dict[str, Counter[str]] = {}
    for group in summary["groups"]:
        name, skips = group["implementation"], group["skips"]
        if name != schema.REFERENCE and group[Verdict.SKIP] == sum(group[one] for one in Verdict):
            if set(skips) != {str(Skip.NO_ADAPTER)}:  # else it has no adapter for the op_type at all
                idle.setdefault(name, Counter()).update(skips)
            continue
        shown = group | {"no oracle": group[NO_ORACLE], "skip": group["skip"] - group[NO_ORACLE]}
        grid.add_row(group["op_type"], name, *(str(shown[key]) for key in columns), _counted(skips))
    console.print(grid)
    for name, skips in sorted(idle.items()):
        console.print(f"Not run here: {name} ({_counted(dict(sorted(skips.items())))})", soft_wrap=True)
    if any(one["grade"] not in {Grade.PROVED, Grade.CHECKED, None} for one in summary["definitions"].values()):
        by_op_type: dict[str, Counter[str]] = {}
        for one in summary["definitions"].values():
            by_op_type.setdefault(one["op_type"], Counter())["wrong" if one["wrong"] else str(one["grade"])] += 1
        grid = headed("Grades of proof, definitions", ["op_type"], (*Grade, "findings", "not verified"))
        for op_type, counts in sorted(by_op_type.items()):
            grid.add_row(op_type, *(str(counts[one]) for one in (*Grade, "wrong", str(None))))
        console.print(grid)
    texts: list[str] = []
    for kind, heading in (("new", "new"), ("unexpected", "not as known.yaml says")):
        findings = summary["findings"][kind]
        texts += [f"\n{len(findings)} {heading}:", *_findings(findings)] if findings else []
    for text in (*texts, f"\n{sentence(summary)}", *sentences(summary)):
        # line breaks are ours; other control characters are anybody's
        safe = "\n".join(map(printable, text.split("\n")))
        console.print(safe, soft_wrap=True)
    return console.export_text()


def _findings(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of text: first a line per definition, if there are several; then some findings of each in full."""
    by_definition: dict[str, list[Mapping[str, Any]]] = {}
    for finding in findings:
        by_definition.setdefault(finding["definition"], []).append(finding)

    def where(one: Mapping[str, Any]) -> str:
        """Case and implementation; a broken file has no case."""
        return one["implementation"] if one["case"] is None else f"case {one['case']}, {one['implementation']}"

    if len(by_definition) > 1:
        for name, (first, *more) in islice(by_definition.items(), DEFINITIONS_SHOWN):
            details = f"{where(first)}, {first['output']}: {first['reason']}"
            yield f"  {printable(name)}: {1 + len(more)}, first {details}"
        if len(by_definition) > DEFINITIONS_SHOWN:
            yield f"  ... and {len(by_definition) - DEFINITIONS_SHOWN} more definitions in summary.json"
        yield ""
    most = max(1, SHOWN // len(by_definition))
    shown = [one for of_it in islice(by_definition.values(), SHOWN) for one in of_it[:most]]
    for one in shown:
        last = (one["message"].strip().splitlines() or [""])[-1]  # an exception's own line
        last = last if len(last) <= 200 else f"{last[:197]}..."
        yield f"  {printable(one['definition'])}, {where(one)}"
        yield f"    {one['output']}  {one['verdict'].upper()}  {one['reason']}: {last}"
        if one["repeat"]:
            yield f"    repeat  {one['repeat']}"
    if len(findings) > len(shown):
        yield f"  ... and {len(findings) - len(shown)} more in summary.json"


def absent(family: str, families: Mapping[str, Sequence[str]], planned: Sequence[str]) -> str:
    """Why nothing of a family was compared, and which families have definitions among the `planned` op_types."""
    present = ", ".join(name for name, op_types in families.items() if set(op_types) & set(planned))
    text = "Nothing was compared: the selected definitions of the dataset have no op_type of family"
    text += f" {family} ({', '.join(families[family])}).\nThey have {', '.join(planned) or 'none at all'}"
    return f"{text}{present and f'; families: {present}'}. Change `dataset` or `selection` in config.yaml."


def plain(width: int = WIDTH) -> Console:
    """A console that records tables and texts which others may have written: nothing in them is markup."""
    return Console(file=io.StringIO(), width=width, record=True, markup=False, emoji=False, highlight=False)


def headed(title: str, words: Iterable[str], numbers: Iterable[str] = (), *last: str) -> Table:
    """A table for a terminal: columns of words, of numbers (right-aligned), and more columns of words."""
    grid = Table(title=title, title_justify="left")
    for name in words:
        grid.add_column(name)
    for name in numbers:
        grid.add_column(name, justify="right")
    for name in last:
        grid.add_column(name)
    return grid

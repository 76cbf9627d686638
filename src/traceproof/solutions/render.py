"""Shows a certificate as a table for a terminal, as JSON, and as one HTML page that loads nothing."""

import json
from collections.abc import Iterator

from rich.console import Console

from traceproof.dataset.records import Trace
from traceproof.reasons import Verdict
from traceproof.run.report import headed, plain
from traceproof.solutions.records import Certificate, SpeedResult, Times
from traceproof.text import printable

SHOWN = 6  # reasons below the table; the certificate has all


def facts(certificate: Certificate) -> list[tuple[str, str]]:
    """(name, text) for everything that the verdict depends on."""
    return [
        ("solution", f"{certificate.path} ({certificate.language}, {certificate.entry})"),
        ("definition", f"{certificate.definition} ({certificate.op_type}), {certificate.definition_path}"),
        ("held against", f"{certificate.against}{f' ({certificate.constants})' if certificate.constants else ''}"),
        ("digest of the solution", certificate.digests.solution),
        ("digest of the definition", certificate.digests.definition),
        ("digest of the judge", certificate.digests.code),
        ("hidden seed", str(certificate.hidden_seed)),
        ("tolerance", "the calibrated gates" if certificate.tolerance is None else f"{certificate.tolerance:g}"),
        ("device", certificate.device),
        ("versions", ", ".join(f"{name} {version}" for name, version in certificate.versions.items())),
        ("isolation", certificate.isolation or "whole"),
        ("judged at", certificate.judged_at),
    ]


def table(certificate: Certificate) -> str:
    """The certificate as text for a terminal."""
    console = plain()
    _show(certificate, console)
    return console.export_text()


def page(certificate: Certificate) -> str:
    """The certificate as an HTML page that loads nothing, with all facts and reasons."""
    console = plain()
    _show(certificate, console, reasons=None)
    for name, value in [*facts(certificate), ("repeat", certificate.repeat)]:
        console.print(f"{name:24}  {printable(value)}", soft_wrap=True)
    return console.export_html(inline_styles=True)


def _show(certificate: Certificate, console: Console, reasons: int | None = SHOWN) -> None:
    """Print the tables of outputs, properties and speed, then the closing lines."""
    numbers = ("calls", "pass", "fail", "error", "skip", "worst margin")
    grid = headed("Outputs by size", ("output", "size"), numbers, "reason")
    kinds = (Verdict.PASS, Verdict.FAIL, Verdict.ERROR, Verdict.SKIP)
    for output, size in dict.fromkeys((row.output, row.size) for row in certificate.rows):
        rows = [row for row in certificate.rows if (row.output, row.size) == (output, size)]
        counts = (len(rows), *(sum(row.verdict is kind for row in rows) for kind in kinds))
        margin = max((row.margin for row in rows if row.margin is not None), default=None)
        odd = [row for row in rows if row.bad] or [row for row in rows if row.verdict is Verdict.SKIP]
        reason = str(odd[0].reason) if odd else ""  # of the first such row
        worst = "" if margin is None else f"{margin:.3g}"
        grid.add_row(printable(output), size, *map(str, counts), worst, reason)
    console.print(grid)
    if certificate.properties:
        grid = headed("Properties", ("property", "state", "counts", "seen"))
        for one in certificate.properties:
            counted = "demanded" if one.demanded else "reported"
            grid.add_row(one.name, one.state, counted, printable(one.detail))
        console.print(grid)
    if certificate.speed:
        numbers = ("calls", "first", "median", "quartiles", "wall", "times faster")
        grid = headed("Speed, milliseconds per call with a cold cache", ("case", "kernel"), numbers)
        for speed in certificate.speed:
            for times in speed.times:
                grid.add_row(printable(speed.case), *figures(speed, times))
        console.print(grid)
    for text in _closing(certificate, reasons):
        console.print(printable(text), soft_wrap=True)


def _closing(certificate: Certificate, reasons: int | None) -> Iterator[str]:
    """Lines below the tables: precision, clocks, the verdict and its reasons."""
    for one in certificate.precision:
        yield f"precision of {one.output}: asked {one.asked}; seen {one.seen} ({one.evidence})"
    for speed in certificate.speed:
        yield f"clocks in {speed.case}: {speed.clocks}"
        if speed.doubt:
            yield f"TIMES OF {speed.case} NOT BELIEVED: {speed.doubt}"
    yield certificate.headline
    shown = certificate.reasons[:reasons]
    yield from (f"  {reason}" for reason in shown)
    if len(certificate.reasons) > len(shown):
        yield f"  ... and {len(certificate.reasons) - len(shown)} more in the certificate"


def figures(speed: SpeedResult, times: Times) -> tuple[str, ...]:
    """A kernel's times as a row of a table."""
    ratio, spread = speed.ratio(times.name), f"{times.lower:.4g} to {times.upper:.4g}"
    shown = (f"{times.first:.4g}", f"{times.median:.4g}", spread, f"{times.wall:.4g}")
    return (times.name, str(times.calls), *shown, "" if ratio is None else f"{ratio:.3g}")


def trace_lines(certificate: Certificate) -> Iterator[str]:
    """Lines of JSON in the dataset's schema of traces, one per case timed together with the reference."""
    for one in certificate.speed:
        reference = next((times for times in one.times if times.name == "reference"), None)
        if reference is None or one.doubt:
            continue
        mean = one.times[0].mean
        line = {
            "definition": certificate.definition,
            "solution": certificate.solution,
            "workload": {"uuid": one.case.removeprefix("workload-"), "axes": one.axes, "inputs": one.inputs},
            "evaluation": {
                "status": "PASSED",
                "log": "",
                "correctness": {
                    "max_relative_error": one.max_rel or 0.0,
                    "max_absolute_error": one.max_abs or 0.0,
                },
                "performance": {
                    "latency_ms": mean,
                    "reference_latency_ms": reference.mean,
                    "speedup_factor": reference.mean / mean if mean else 0.0,
                },
                "environment": {"hardware": certificate.device, "libs": certificate.versions},
                "timestamp": certificate.judged_at,
            },
        }
        yield json.dumps(Trace.model_validate(line).as_json(), ensure_ascii=False) + "\n"


def as_json(certificate: Certificate) -> str:
    """The text of the certificate's file."""
    return json.dumps(certificate.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"

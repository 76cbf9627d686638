"""What rules run in the driver's environment, a function per job; its parameters are its options."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `entry.run`: an interrupted import is no traceback

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Json

from traceproof.config import ModelChoice
from traceproof.dataset.fetch import Dataset, fetch
from traceproof.environments.building import FOLDER, Installation, ready
from traceproof.files import read_sealed, write_json
from traceproof.run import entry
from traceproof.text import printable


def environment(*, name: str, stamp: Path) -> None:
    """Build one of .venvs/ from its pins, as the rule says, unless it is whole: another run may have built it."""
    ready(Installation.at(name, str(FOLDER / name / "bin" / "python")), root=Path.cwd(), say=lambda _: None)
    stamp.touch()


def stack(*, name: str, python: str, cuda_home: str, source: str, linked: Path, out: Path) -> None:
    """Ask a stack's interpreter what it is. Its package is the installed one, unless `source` says otherwise."""
    from traceproof.checkouts.sources import source_folder
    from traceproof.environments.building import record_stack

    checkout = source_folder(name, source) if source else None
    record_stack(Installation.at(name, python, cuda_home=cuda_home), checkout, linked=linked, out=out)


def dataset(*, source: Json[Dataset], stamp: Path) -> None:
    """Fetch the configured dataset."""
    fetch(source, root=stamp.parent.parent)


def clone(*, lock: Path, dataset: Path, origin: Json[Dataset], out: Path) -> None:
    """Clone all that sources.lock pins, and record the dataset beside it; nothing is resolved anew."""
    from traceproof.checkouts.checkout import write_records
    from traceproof.checkouts.pins import DATASET, read_lock
    from traceproof.cli.sources import clone_repos

    write_records(out.parent, {DATASET: origin.record(dataset)})
    if names := sorted(read_lock(lock).keys() - {DATASET}):  # without names, it would pin every source it knows
        clone_repos(names, target_dir=out.parent, lock=lock, pinned=True)


def sources(*, pins: Json[dict[str, Any]], out: Path) -> None:
    """Clone the sources that stacks take from sources.lock, and record what their files are like."""
    from traceproof.checkouts.sources import SOURCES, scan
    from traceproof.cli.sources import clone_repos

    if pins:
        clone_repos(sorted(pins), target_dir=SOURCES, pinned=True)
    write_json(out, {"pins": pins, "scans": {name: scan(SOURCES / name) for name in pins}})


def extract(
    *, models: Json[tuple[ModelChoice, ...]], dataset: Path, extract_python: Path, torch_python: Path, stamp: Path
) -> None:
    """Put the configured dataset and the definitions of the configured models in one folder, the stamp's."""
    from traceproof.extract import pipeline
    from traceproof.extract.reading import ReaderEnvironment
    from traceproof.programs import telling

    environment = ReaderEnvironment(extract_python.absolute())
    settings = pipeline.ExtractionSettings(environment=environment, torch_python=torch_python.absolute())
    folders = {"dataset": dataset, "out": stamp.parent, "report": stamp.parent.parent}
    with telling("extracting"):
        pipeline.run(models, settings, **folders, say=partial(_say, "extract"))


def report(
    *,
    verdicts: list[Path],
    known: Path | None,
    stacks: list[Path],
    lock: Path | None,
    history: Path,
    scope: Json[dict[str, Any] | None],
    cache: Path,
    summary: Path,
) -> None:
    """Summarise, and keep the verdicts under the digest of all that they stand on, unless a user relaxed them."""
    from traceproof.bumps import Scope, keep
    from traceproof.checkouts.pins import read_lock
    from traceproof.run.report import MADE_OF, report

    records = [read_sealed(path) for path in stacks]
    made_of = report(verdicts, summary, known=known, stacks=records, cache=cache)[MADE_OF]
    if scope is not None:
        keep(
            history,
            {path: made_of[path.name] for path in verdicts},
            records,
            read_lock(lock) if lock else {},
            Scope(**scope),
        )


def tests(
    *,
    out: Path,
    cases: list[Path],
    known: Path | None,
    tolerance: Json[float | None],
    sizes: list[str],
    python: str,
) -> None:
    """Write the tests of what was planned; `python` has PyTorch.

    A definition that no file can be named after gets none: no failure.
    """
    from traceproof.run.known import read_known
    from traceproof.run.schema import OpTypePlan
    from traceproof.testgen.generate import Divergences, GenerateOptions, generate

    plans = list(map(OpTypePlan.read, cases))
    order = GenerateOptions(
        root=Path(plans[0].dataset if plans else "."),
        out=out.parents[1],
        definitions=tuple(name for plan in plans for name in plan.whole),
        sizes=tuple(sizes),
        tolerance=tolerance,
        force=True,
        python=python,
    )
    divergences = Divergences(known=read_known(known).findings if known is not None else ())
    out.mkdir(parents=True, exist_ok=True)
    for problem in generate(order, divergences, planned=True).problems if plans else ():
        sys.stderr.write(f"tests      no test: {printable(problem)}\n")


def tests_report(*, rows: list[Path], stacks: list[Path], known: Path | None, out: Path) -> None:
    """Put what every generated test came to in one file, known failures marked."""
    from traceproof.run.known import read_known
    from traceproof.testgen.running import read_rows
    from traceproof.testgen.summary import judged

    versions = {record["stack"]: record["versions"] for record in map(read_sealed, stacks)}
    write_json(out, judged(read_rows(rows), read_known(known), versions))


def publish(*, dataset: Path, base: Path, origin: Json[Dataset], run: Path, python: Path, out: Path) -> None:
    """Write the dry run of everything that is verified. It can not push: it has no code for it."""
    from traceproof.publish.pull_request import NothingVerifiedError, Source, base_of, dry_run, prepare, provenance

    root, listed = Path.cwd(), []
    source = Source(
        root=root,
        dataset=dataset,
        base=base,
        run=run,
        python=str(python.absolute()),
        provenance=provenance(root, origin),
    )
    try:
        made = prepare(source, definitions=[], op_types=[], per="definition")
        listed = [dry_run(item, base_of(source), out.parent) for item in made]
    except NothingVerifiedError as error:  # an empty list says so; the verdicts say why
        _say("publish", str(error))
    for item in listed:
        for problem in item["problems"]:
            _say("publish", f"{item['pull_request']} could not be sent as it is: {problem}")
    write_json(out, listed)


def site(*, results: Path, run: Path, out: Path) -> None:
    """Write the pages of a finished run."""
    from traceproof.site.build import Finished, build

    built = build(Finished(results, run), out)
    _say("site", f"{built.pages} pages in {built.folder}")


def conclude(
    *,
    sources: Path | None = None,
    tests: Path | None = None,
    summary: Path | None = None,
    dry_run: Path | None = None,
    selection: str = "",
) -> bool:
    """Print what a target came to, of what is given; findings fail it. All results stay where they are."""
    from traceproof.ops.registry import families
    from traceproof.run.report import absent, read_summary, table
    from traceproof.run.schema import Index
    from traceproof.testgen import summary as of_tests

    findings, text = False, ""
    if sources:
        for name, record in sorted(json.loads(sources.read_bytes())["repositories"].items()):
            text += f"{name:18} {record['commit'] or record['version'] or 'in place'}  {record['path']}\n"
    if tests:
        found = json.loads(tests.read_bytes())
        text += of_tests.table(found)
        findings = not found["passed"]
    if summary:
        verdicts = read_summary(summary)
        text += table(verdicts)
        if summary.parent.name == "summaries" and not verdicts["groups"]:  # of a family
            planned = Index.read(summary.parent.parent / "cases" / "index.json").op_types
            text += f"{absent(summary.stem, families(), sorted(planned))}\n"
        findings = findings or not verdicts["verified"]
    if dry_run:
        from traceproof.publish.pull_request import dry_run_text

        text += dry_run_text(dry_run, selection)
    sys.stdout.write(text)
    return findings


def _say(what: str, line: str) -> None:
    """Tell the log, and who watches."""
    sys.stderr.write(f"{what:10} {line}\n")


if __name__ == "__main__":
    entry.main()

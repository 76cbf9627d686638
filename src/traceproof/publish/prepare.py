"""From a run's verdicts to bundles on disk: the dry run. Nothing here can send anything."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from traceproof import programs
from traceproof.checkouts.gitrun import Git, GitError
from traceproof.dataset.fetch import Dataset
from traceproof.dataset.tree import DatasetTree, read_tree, why
from traceproof.errors import TraceproofError
from traceproof.files import write_json, write_text
from traceproof.names import fresh_folder, path_part
from traceproof.programs import without_secrets
from traceproof.publish.bundle import Base, Bundle, Folder, assemble, card_bundle, write_tests
from traceproof.publish.change import Change, resolve
from traceproof.publish.check import problems
from traceproof.publish.coverage import Row, coverage, table, tag_values
from traceproof.publish.ledger import REFERENCE, Ledger, keep
from traceproof.testgen.generate import GENERATED
from traceproof.testgen.summary import Report, described
from traceproof.text import markdown, printable, redacted

Per = Literal["definition", "op_type", "all"]
LEDGER = "ledger.jsonl"
TESTS = "tests.json"  # of a run: what its generated tests came to
HEAD = """every reference below was run against an independent float64 oracle, and ground-truth kernels
were run against it on the same inputs. The status tags follow from these verdicts; none was set by hand."""
CARD = "A card, and a table of the verified definitions, so that the hub's viewer shows what the dataset holds."
SHOWN = 60  # lines of a list; the dry run's file list has all


class NothingVerifiedError(TraceproofError):
    """A selection of which nothing is verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A finished run."""

    root: Path  # the repository
    dataset: Path  # folder of the dataset that was verified
    run: Path  # the run's folder, with `verdicts/`, `cases/` and, where tests were generated, `generated/`
    results: Path  # the folder that all runs share
    python: str  # interpreter of the torch stack
    provenance: Mapping[str, str]  # where things come from, for the description
    # the dataset as it is published, where what was verified holds more (extracted definitions)
    base: Path | None = None
    extra: tuple[Path, ...] = ()  # folders in the dataset's layout with measured traces and tests
    tests: bool = True  # whether tests are generated for definitions that have none
    tests_output: str = ""  # what the generated tests printed; empty: what the run's own tests came to is said


@dataclass(frozen=True, slots=True)
class Prepared:
    """A bundle with what describes it."""

    bundle: Bundle
    ledger: Ledger
    source: Source
    coverage: tuple[Row, ...]

    def describe(self, change: Change) -> str:
        """The pull request's text on top of a base, Markdown; equal bytes whenever what it tells is equal."""
        bundle, names = self.bundle, list(self.bundle.definitions)
        if not names:
            return f"{CARD}\n\n{bundle.marker}\n"
        what = f"`{names[0]}`" if len(names) == 1 else f"{len(names)} definitions"
        left = [*(f"{path}: left as it is in the dataset" for path in change.kept), *bundle.notes]
        # Indented: no line of it is markup, or the one that a pull request is found by.
        output = redacted((self.source.tests_output or self._tests()).strip("\n")).splitlines()
        repeat = [f"traceproof verify --definition-name {name}" for name in names[:5]]
        repeat += [f"# ... and {len(names) - 5} more"] if len(names) > 5 else []
        sections: dict[str, Iterable[str]] = {
            "Provenance": _provenance(bundle, self.ledger, self.source.provenance),
            "Verdicts": _verdicts(bundle, self.ledger),
            "Model coverage": _short(table(self.rows) if self.rows else []),
            "Changes to what is there": _short([f"- {markdown(line)}" for line in change.differs]),
            "Left out": _short([f"- {markdown(line)}" for line in left]),
            "Output of the tests": [f"    {printable(line)}" for line in output],
            "Repeat": ["```", *repeat, "```"],
        }
        told = {title: list(lines) for title, lines in sections.items()}
        parts = ["\n".join([f"## {title}", "", *lines]) for title, lines in told.items() if lines]
        return "\n\n".join([f"{what}: {HEAD}", *parts, bundle.marker]) + "\n"

    def _tests(self) -> str:
        """What the run's generated tests came to for its definitions; empty: they were not run."""
        try:
            report: Report = json.loads((self.source.run / TESTS).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return ""
        digests = {name: definition.digest for name, definition in self.bundle.definitions.items()}
        return described(report["rows"], digests, digests)

    @property
    def rows(self) -> list[Row]:
        """Model coverage of its definitions."""
        return [row for row in self.coverage if row.definition in self.bundle.definitions]


def origin_of(dataset: Dataset) -> str:
    """Where a dataset comes from, in words."""
    if dataset.pypi is not None:
        return f"{dataset.pypi.package} {dataset.pypi.version}"
    if dataset.git is not None:
        return f"{redacted(dataset.git.url)} {dataset.git.commit}"
    return "a local folder"


def provenance(root: Path, dataset: Dataset) -> dict[str, str]:
    """Where a run's things come from: the dataset, traceproof, the pinned sources."""
    return {"dataset": origin_of(dataset), "traceproof": source_commit(root), **pinned(root)}


def prepare(source: Source, *, definitions: Sequence[str], op_types: Sequence[str], per: Per) -> list[Prepared]:
    """The bundles of a selection; without names, of everything that is verified.

    Raises:
        TraceproofError: there are no verdicts, a name is not in the dataset, or something named is not verified.
    """
    tree = read_tree(source.dataset)
    ledger = write_ledger(source, tree)
    names = _names(tree, ledger, definitions, op_types)
    parts = source.run / "publish" / "parts"
    verified = [name for name in names if ledger.standing(tree.definitions[name].definition).verified]
    if verified:  # assembling tells what is wrong with the others
        _write_parts(source, tree, verified, parts)
    tests, lacking = source.run / "publish" / "tests", {}
    if source.tests:
        lacking = write_tests(tree, verified, tests, generated=source.run / GENERATED, python=source.python)
    rows = coverage((entry.definition for entry in tree.definitions.values()), ledger)
    made = []
    for slug, title, group in _groups(tree, names, per):
        notes = [f"{name}: {lacking[name]}" for name in group if name in lacking]
        extra = (*([tests] if source.tests else []), *source.extra)
        bundle = assemble(tree, ledger, group, slug=slug, title=title, parts=parts, extra=extra, notes=notes)
        made.append(Prepared(bundle, ledger, source, rows))
    return made


def prepare_card(source: Source, ledger: Ledger) -> Prepared:
    """The bundle of the dataset card, after those of the definitions."""
    made = card_bundle(read_tree(source.dataset), ledger, source.base or source.dataset)
    return Prepared(made, ledger, source, ())


def write_ledger(source: Source, tree: DatasetTree) -> Ledger:
    """The ledger of a run, written anew. Raises TraceproofError: nothing was verified yet."""
    verdicts = sorted((source.run / "verdicts").glob("*.jsonl"))
    if not verdicts:
        raise TraceproofError(f"no verdicts below {source.run}", todo="Verify first: `traceproof verify`.")
    references = {name: entry.definition.reference for name, entry in tree.definitions.items()}
    return keep(verdicts, source.run / LEDGER, source.results, references=references)


def _names(tree: DatasetTree, ledger: Ledger, definitions: Sequence[str], op_types: Sequence[str]) -> list[str]:
    unknown = [f"definition {why(tree, name)}" for name in definitions if name not in tree.definitions]
    present = {entry.definition.op_type for entry in tree.definitions.values()}
    unknown += [f"op_type {name!r}" for name in op_types if name not in present]
    if unknown:
        raise TraceproofError(f"the dataset {tree.root} does not have", problems=unknown)
    names = list(definitions)
    for name, entry in tree.definitions.items():
        wanted = entry.definition.op_type in op_types or not (definitions or op_types)
        if wanted and name not in names and ledger.standing(entry.definition).verified:
            names.append(name)
    if not names:
        raise NothingVerifiedError(
            "nothing is verified, so nothing can be published", todo=f"Read {LEDGER} for why."
        )
    return names


def _groups(tree: DatasetTree, names: Sequence[str], per: Per) -> Iterator[tuple[str, str, list[str]]]:
    if per == "all":
        yield "all", "feat: add what was verified of the dataset", list(names)
    elif per == "definition":
        for name in names:
            yield f"definition-{name}", f"feat: add what was verified of {name}", [name]
    else:
        by_type: dict[str, list[str]] = {}
        for name in names:
            by_type.setdefault(tree.definitions[name].definition.op_type, []).append(name)
        for op_type, group in by_type.items():
            yield f"op_type-{op_type}", f"feat: add what was verified of op_type {op_type}", group


def _write_parts(source: Source, tree: DatasetTree, names: Sequence[str], parts: Path) -> None:
    """One process for all op_types: importing torch takes longer than the parts of most of them."""
    command = [source.python, "-P", "-m", "traceproof.publish.parts", "--out", str(parts)]
    op_types = dict.fromkeys(tree.definitions[name].definition.op_type for name in names)
    command += ["--cases", *(str(source.run / "cases" / f"{op_type}.json") for op_type in op_types)]
    command += ["--ledger", str(source.run / LEDGER), "--only", *names]
    environment = without_secrets() | {"PYTHONPATH": str(source.root / "src")}
    done = programs.run(command, environment=environment)
    if done.returncode:
        said = programs.last_lines(done.stderr)
        raise TraceproofError("the parts of the bundles could not be made", problems=said)


def dry_run(prepared: Prepared, out: Path, *, allow_changes: bool, base: Base | None = None) -> dict[str, Any]:
    """Write what a push would send, as `show` does, and refuse a bundle that can not be sent.

    Raises TraceproofError: the bundle breaks a rule (what was written stays, to be looked at), or the folder can
    not be written.
    """
    listed, change = show(prepared, out, allow_changes=allow_changes, base=base)
    if listed["problems"]:
        todo = f"What it would hold is in {out / path_part(prepared.bundle.slug)}."
        if change.problems:
            todo += " If the changes are meant, give --allow-changes."
        raise TraceproofError(
            f"{prepared.bundle.slug} cannot be published", problems=listed["problems"], todo=todo
        )
    return listed


def show(
    prepared: Prepared, out: Path, *, allow_changes: bool = False, base: Base | None = None
) -> tuple[dict[str, Any], Change]:
    """Write what a push would send below `out`: the files, their list, the description; the list and the change.

    The list's `problems` say why it could not be sent as it is. Raises TraceproofError: the folder can not be
    written.
    """
    on_top = base or Folder(prepared.source.base or prepared.source.dataset)
    change = resolve(prepared.bundle, on_top, allow_changes=allow_changes)
    found = problems(prepared.bundle, change, on_top)
    folder = fresh_folder(out / path_part(prepared.bundle.slug), within=out)
    for path, data in change.files.items():
        target = folder / "files" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    listed = {
        "bundle": prepared.bundle.slug,
        "title": prepared.bundle.title,
        "base": on_top.revision,
        "files": [
            {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for path, data in sorted(change.files.items())
        ],
        "unchanged": sorted(change.same),
        "kept": sorted(change.kept),
        "problems": found,
    }
    write_json(folder / "files.json", listed)
    write_text(folder / "description.md", prepared.describe(change))
    write_json(folder / "coverage.json", [row.as_json() for row in prepared.rows])
    return listed, change


def source_commit(root: Path) -> str:
    """The commit of a git checkout, `-dirty` if files differ from it; empty: it is none."""
    try:
        return Git(root).local("describe", "--always", "--dirty", "--abbrev=40", "--match=").strip()
    except GitError:
        return ""


def pinned(root: Path) -> dict[str, str]:
    """Commits and versions that `sources.lock` pins; what was run may be of others, which is said apart."""
    try:
        found = json.loads((root / "sources.lock").read_text(encoding="utf-8"))["sources"]
    except (OSError, ValueError, KeyError):
        return {}
    return {
        f"pinned {name}": str(pin.get("commit") or pin.get("version") or "") for name, pin in sorted(found.items())
    }


def _provenance(bundle: Bundle, ledger: Ledger, provenance: Mapping[str, str]) -> Iterator[str]:
    models = sorted({model for item in bundle.definitions.values() for model in tag_values(item.tags, "model")})
    yield "| what | |"
    yield "|---|---|"
    rows = {"models": ", ".join(models), **provenance}
    used = [
        ledger.records[name][implementation]
        for name, standing in bundle.standings.items()
        for implementation in (REFERENCE, *standing.truths)
    ]
    rows["devices"] = ", ".join(sorted({record.device or "unknown" for record in used}))
    rows["versions"] = ", ".join(sorted({f"{k} {v}" for record in used for k, v in record.versions.items()}))
    rows["seeds"] = ", ".join(sorted({str(record.seed) for record in used}))
    rows["compared"] = f"{sum(record.compared for record in used)} outputs"
    for what, value in rows.items():
        if value:
            yield f"| {markdown(what)} | {markdown(redacted(value))} |"


def _verdicts(bundle: Bundle, ledger: Ledger) -> Iterator[str]:
    yield "| definition | implementation | status | cases | outputs | gates (share of the limit used) | date |"
    yield "|---|---|---|---|---|---|---|"
    for name in bundle.definitions:
        found = ledger.records[name].values()
        for record in sorted(found, key=lambda item: (item.implementation != REFERENCE, item.implementation)):
            if record.status == "not run" and set(record.skipped) == {"no_adapter"}:
                continue
            gates = []
            for output, gate in record.gates.items():
                margin = "" if gate["margin"] is None else f" {gate['margin']:.2f}"
                gates.append(f"{output}: {'+'.join(gate['kinds']) or 'exact'}{margin}")
            status = record.status if not record.reason else f"{record.status}: {record.reason}"
            cells = (
                record.implementation,
                status,
                len(record.cases),
                record.compared,
                ", ".join(gates),
                record.date,
            )
            yield f"| `{record.definition}` | {' | '.join(markdown(str(cell)) for cell in cells)} |"


def _short(lines: Sequence[str]) -> list[str]:
    more = len(lines) - SHOWN
    return [*lines[:SHOWN], *([f"- ... and {more} more"] if more > 0 else [])]

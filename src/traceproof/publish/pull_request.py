"""From a run's verdicts to pull requests on disk: the dry run. Nothing here can send anything."""

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from traceproof import programs
from traceproof.checkouts.gitrun import Git, GitError
from traceproof.dataset.definition import Definition, Dialect
from traceproof.dataset.fetch import Dataset
from traceproof.dataset.records import BASELINE, Trace
from traceproof.dataset.tree import (
    DatasetEntry,
    DatasetTree,
    file_bytes,
    file_text,
    json_text,
    read_tree,
    strict_json,
    why,
)
from traceproof.errors import TraceproofError
from traceproof.files import NotPlainError, disk_errors, kept_json, own_folder, write_json, write_text
from traceproof.names import fresh_folder, path_part
from traceproof.programs import without_secrets
from traceproof.publish import verified
from traceproof.publish.verified import ModelRow, Verdicts, Verification
from traceproof.run.schema import REFERENCE, each_row
from traceproof.stacks import STACK_OF, distribution
from traceproof.testgen.generate import GENERATED, PLACE, Divergences, GenerateOptions, generate, state, whose
from traceproof.testgen.summary import described
from traceproof.text import markdown, printable, redacted

Per = Literal["definition", "op_type", "all"]
TESTS = "tests.json"  # a run's file with results of its generated tests
HEAD = """every reference below was run against an independent float64 oracle, and ground-truth kernels
were run against it on the same inputs. The status tags follow from these verdicts; none was set by hand."""
SHOWN = 60  # lines of a list; the dry run's file list is complete
NAMED = 20  # definitions that an error lists


# What a pull request changes in a dataset's present state, and why it may not be opened. DeepDiff can not be used:
# it ignores the order of keys, and the order of a definition's axes, inputs and outputs counts.
FOLDERS = ("definitions", "tests", "solutions", "traces", "workloads", "blob")  # of a dataset
LINES_SHOWN = 40  # of a file's difference
LINES_NAMED = 4  # changed lines named in a problem
LARGEST = 1 << 30  # largest file of a dataset, in bytes
SECRET = re.compile(rb"hf_[A-Za-z0-9]{20,}|HF_TOKEN\s*=\s*\S|-----BEGIN [A-Z ]*PRIVATE KEY")


class Base(Protocol):
    """A state of a dataset, to which a pull request is added."""

    @property
    def revision(self) -> str:
        """Its name in messages: a commit, or a folder."""

    def paths(self) -> frozenset[str]:
        """Paths of all files."""

    def read(self, path: str) -> bytes | None:
        """A file's content; None: it is not there."""


@dataclass(frozen=True)
class Folder:
    """A dataset's folder on this machine, as a Base."""

    root: Path
    revision: str = "the local dataset"

    def paths(self) -> frozenset[str]:
        """Paths of all files."""
        files = (path for name in FOLDERS for path in (self.root / name).rglob("*") if path.is_file())
        return frozenset(path.relative_to(self.root).as_posix() for path in files)

    def read(self, path: str) -> bytes | None:
        """A file's content; None: it is not there."""
        try:
            return file_bytes(self.root / path, self.root, most=LARGEST)
        except (FileNotFoundError, NotADirectoryError, NotPlainError):
            return None


@dataclass
class Change:
    """The files of a pull request, compared with a base."""

    files: dict[str, bytes] = field(default_factory=dict)  # content of added or replaced files, by path
    # unchanged files (a definition: with equal values)
    same: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)  # lines that say how existing files would change
    # existing files that stay, though the pull request has others
    kept: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # why it can not be opened


def resolve(files: Mapping[str, bytes], base: Base, *, allow_changes: bool) -> Change:
    """Compare files with a base; of workloads and traces, `files` has only the new lines.

    Problems are collected, not raised.
    """
    change = Change()
    present = base.paths()
    for path, data in files.items():
        _resolve(path, data, base.read(path) if path in present else None, change, allow_changes=allow_changes)
        if SECRET.search(data):
            change.problems.append(f"{path}: holds what looks like a secret")
    for path in files:
        folder, leaf = path.partition("/")[0], path.rpartition("/")[2]
        if folder in {"solutions", "definitions"}:  # flashinfer-bench refuses a dataset with a repeated name
            others = (key for key in present if key.startswith(f"{folder}/") and key.rpartition("/")[2] == leaf)
            change.problems += [f"{path}: its name is taken by {key}" for key in others if key != path]
        if folder == "traces":
            every = (key for key in {*files, *present} if key.startswith("workloads/"))
            workloads = (key for key in every if key.rpartition("/")[2] == leaf)
            lines = [change.files.get(key, b"") or base.read(key) or b"" for key in workloads]
            known = {_identity(line)[0] for data in lines for line in data.splitlines()}
            change.problems += [f"{path}: {problem}" for problem in _unfit(files[path], known)]
    return change


def _resolve(path: str, data: bytes, old: bytes | None, change: Change, *, allow_changes: bool) -> None:
    """Add a file to `change`: as new, the same, different (with a note), kept, or a problem."""
    lines = path.startswith(("workloads/", "traces/"))
    new = joined(old or b"", data) if lines else data
    if old is None:
        change.files[path] = new
    elif new == old or (path.startswith("definitions/") and _same_definition(old, new)):
        change.same.append(path)
    elif lines:
        change.files[path] = new
        more = len(new.splitlines()) - len(old.splitlines())
        change.differs.append(f"{path}: {more} lines more, the others as they were")
    elif path.startswith("tests/") and whose(old.decode(errors="replace")) == "ours":
        change.files[path] = new
        change.differs.append(f"{path}: generated again")
    elif path.startswith("tests/") and not allow_changes:
        change.kept.append(path)
    else:
        change.files[path] = new
        shown = differences(old, new)
        change.differs += [f"{path}:", *shown]
        if not allow_changes:
            changed = [" ".join(line.split()) for line in shown if line.startswith(("+", "-"))] or shown
            rest = f" and {len(changed) - LINES_NAMED} lines more" if len(changed) > LINES_NAMED else ""
            change.problems.append(f"{path} exists and would change: {', '.join(changed[:LINES_NAMED])}{rest}")


def joined(old: bytes, new: bytes) -> bytes:
    """Old lines followed by the new ones whose workload and solution are not among them."""
    end = b"" if not old or old.endswith(b"\n") else b"\n"
    known = {_identity(line) for line in old.splitlines() if line.strip()}
    fresh = [line for line in new.splitlines() if line.strip() and _identity(line) not in known]
    return old + end + b"".join(line + b"\n" for line in fresh) if fresh else old


def _identity(line: bytes) -> tuple[str, str]:
    """(workload, solution) of a line; other lines are identified by their text."""
    try:
        value = json.loads(line)
        return str(value["workload"]["uuid"]), str(value.get("solution"))
    except (ValueError, KeyError, TypeError, RecursionError):
        return line.decode(errors="replace"), ""


def _unfit(traces: bytes, known: Iterable[str]) -> Iterator[str]:
    """Problems of measured traces; `known` are uuids of the definition's workloads."""
    for number, line in enumerate(traces.splitlines(), start=1):
        try:
            trace = Trace.model_validate(strict_json(line.decode()))
        except (ValueError, RecursionError) as error:
            yield f"line {number} does not fit the schema: {' '.join(str(error).split())[:300]}"
            continue
        if trace.evaluation is None or trace.evaluation.status != "PASSED":
            yield f"line {number} did not pass; only PASSED traces are published"
        elif trace.workload.uuid not in known:
            yield f"line {number}: workload {trace.workload.uuid} is no line of the definition's workloads"


def _same_definition(first: bytes, second: bytes) -> bool:
    """Whether two files hold the same definition, including the order of axes, inputs and outputs."""
    try:
        values = [Definition.model_validate(strict_json(text.decode())).as_json() for text in (first, second)]
    except (ValueError, RecursionError):
        return False
    return len({json.dumps(value) for value in values}) == 1


def differences(old: bytes, new: bytes) -> list[str]:
    """Unified difference of two files; JSON is formatted first, and texts in it are split into lines."""
    lines = list(difflib.unified_diff(_lines(old), _lines(new), lineterm="", n=2))[2:]
    more = [f"... and {len(lines) - LINES_SHOWN} lines more"] if len(lines) > LINES_SHOWN else []
    return [*lines[:LINES_SHOWN], *more] or ["only its formatting"]


def _lines(data: bytes) -> list[str]:
    try:
        text = json_text(json.loads(data)).replace("\\n", "\n")
    except (ValueError, RecursionError):  # no JSON, or nested too deeply
        text = data.decode(errors="replace")
    return text.splitlines()


def traces_path(definition: Definition) -> str:
    """Path at which flashinfer-bench expects traces of a definition's baseline."""
    return f"traces/{BASELINE}/{definition.op_type}/{definition.name}.jsonl"


# Pull requests.


class NothingVerifiedError(TraceproofError):
    """Nothing of a selection is verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A finished run, and where it came from."""

    root: Path  # the repository
    dataset: Path  # the dataset that was verified
    run: Path  # folder with `verdicts/`, `cases/` and, if tests were generated, `generated/`
    python: str  # interpreter of the torch environment
    provenance: Mapping[str, str]  # origins, for the description
    # the published dataset, if the verified one has extracted definitions added
    base: Path | None = None
    traces: tuple[Path, ...] = ()  # folders of measured traces, in the dataset's layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """One pull request: its files, and the facts for its description."""

    slug: str  # its name, equal in every run: `definition-<name>`, `op_type-<name>` or `all`
    title: str
    definitions: Mapping[str, Definition]  # by name, with the tags that they earned
    verdicts: Mapping[str, Verdicts]  # by definition
    verifications: Mapping[str, Verification]
    files: Mapping[str, bytes]  # by path; of workloads and traces, the new lines
    notes: tuple[str, ...]  # what was left out, and why; a line each
    provenance: Mapping[str, str]
    tests: str  # results of generated tests; empty: not run

    @property
    def marker(self) -> str:
        """The last line of the description, by which an open pull request is found again."""
        return f"traceproof-pull-request: {self.slug}"

    @property
    def models(self) -> list[ModelRow]:
        """Rows of models and their definitions in it."""
        pairs = ((definition, self.verifications[name]) for name, definition in self.definitions.items())
        rows = (row for definition, verification in pairs for row in verified.model_rows(definition, verification))
        return sorted(rows, key=lambda row: (row.model, row.op_type, row.definition))

    def describe(self, change: Change) -> str:
        """Its description in Markdown for a comparison with a base; equal facts give equal bytes."""
        names = list(self.definitions)
        what = f"`{names[0]}`" if len(names) == 1 else f"{len(names)} definitions"
        left_out = [*(f"{path}: left as it is in the dataset" for path in change.kept), *self.notes]
        repeat = [f"traceproof verify --definition-name {name}" for name in names[:5]]
        repeat += [f"# ... and {len(names) - 5} more"] if len(names) > 5 else []
        sections: dict[str, Iterable[str]] = {
            "Provenance": self._origin(),
            "Verdicts": self._verdicts(),
            "Model coverage": _short(verified.model_table(self.models) if self.models else []),
            "Changes to what is there": _indented(_short(change.differs)),
            "Left out": _short([f"- {markdown(line)}" for line in left_out]),
            "Output of the tests": _indented(self.tests.splitlines()),
            "Repeat": ["```", *repeat, "```"],
        }
        lists = {title: list(lines) for title, lines in sections.items()}
        parts = ["\n".join([f"## {title}", "", *lines]) for title, lines in lists.items() if lines]
        return "\n\n".join([f"{what}: {HEAD}", *parts, self.marker]) + "\n"

    def _origin(self) -> Iterator[str]:
        """A table of models, origins, devices, versions and seeds."""
        items = self.verifications.items()
        used = [self.verdicts[name][source] for name, result in items for source in (REFERENCE, *result.truths)]
        tags = [tag for definition in self.definitions.values() for tag in definition.tags]
        listed: dict[str, Iterable[str]] = {
            "models": verified.tag_values(tags, "model"),
            **{what: [value] for what, value in self.provenance.items()},
            "devices": (total.device or "unknown" for total in used),
            "versions": (f"{k} {v}" for total in used for k, v in total.versions.items()),
            "seeds": (str(total.seed) for total in used),
            "compared": [f"{sum(total.compared for total in used)} outputs"],
        }
        rows = {what: ", ".join(sorted(set(values))) for what, values in listed.items()}
        yield from ("| what | |", "|---|---|")
        yield from (f"| {markdown(what)} | {markdown(redacted(value))} |" for what, value in rows.items() if value)

    def _verdicts(self) -> Iterator[str]:
        """Lines of a Markdown table with the results of each implementation."""
        yield "| definition | implementation | status | cases | outputs | gates (share of the limit used) |"
        yield "|---|---|---|---|---|---|"
        for name in self.definitions:
            verdicts = sorted(self.verdicts[name].items(), key=lambda item: (item[0] != REFERENCE, item[0]))
            for implementation, total in verdicts:
                if total.status == "not run" and set(total.skipped) == {"no_adapter"}:
                    continue
                margins = {name: gate["margin"] for name, gate in total.gates.items()}
                used = {name: "" if margin is None else f" {margin:.2f}" for name, margin in margins.items()}
                gates = [
                    f"{out}: {'+'.join(gate['kinds']) or 'exact'}{used[out]}" for out, gate in total.gates.items()
                ]
                status = f"{total.status}: {total.reason}" if total.reason else total.status
                cells = (implementation, status, str(len(total.cases)), str(total.compared), ", ".join(gates))
                yield f"| `{name}` | {' | '.join(map(markdown, cells))} |"


def _short(lines: Sequence[str]) -> list[str]:
    more = [f"- ... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [*lines[:SHOWN], *more]


def _indented(lines: Iterable[str]) -> list[str]:
    """Lines as a code block, so that none is read as markup, or as the marker."""
    return [f"    {printable(redacted(line))}" for line in lines]


def prepare(source: Source, *, definitions: Sequence[str], op_types: Sequence[str], per: Per) -> list[PullRequest]:
    """The pull requests for a selection; without names, for everything that is verified.

    Raises TraceproofError: there are no verdicts, or damaged ones; a name is not in the dataset, or a named
    definition is not verified.
    """
    paths = sorted((source.run / "verdicts").glob("*.jsonl"))
    if not paths:  # checked before the dataset, which is not fetched before the first run
        todo = f"Verify first: `traceproof verify`{verified.or_narrower(source.run)}."
        raise TraceproofError(f"no verdicts below {source.run}", todo=todo)
    verdicts = verified.implementation_verdicts(row for path in paths for row in each_row(path))
    tree = read_tree(source.dataset)
    verifications = {
        name: verified.verification(entry.definition, verdicts.get(name, {}))
        for name, entry in tree.definitions.items()
    }
    names = _names(tree, verifications, definitions, op_types)
    _write_solutions(source, tree, {name: verdicts[name] for name in names}, verifications)
    lacking = _write_tests(source, tree, names)
    pull_requests = []
    for slug, title, group in _groups(tree, names, per):
        files: dict[str, bytes] = {}
        notes = [f"{name}: {lacking[name]}" for name in group if name in lacking]
        tagged: dict[str, Definition] = {}
        for name in group:
            entry = tree.definitions[name]
            tagged[name] = entry.definition.model_copy(update={"tags": verifications[name].tags(entry.definition)})
            written = json.loads((_parts(source) / path_part(name) / "notes.json").read_text(encoding="utf-8"))
            left_out = [f"case {case} is no workload: {reason}" for case, reason in written["left_out"].items()]
            remarks = [*(f"no baseline by {reason}" for reason in written["no_baseline"]), *left_out]
            notes += [f"{name}: {line}" for line in remarks]
            files |= _files(source, tree, entry, tagged[name], written["solution"])
        pull_requests.append(
            PullRequest(
                slug=slug,
                title=title,
                definitions=tagged,
                verdicts={name: verdicts[name] for name in group},
                verifications={name: verifications[name] for name in group},
                files=dict(sorted(files.items())),
                notes=tuple(notes),
                provenance=source.provenance,
                tests=_tests(source.run, tagged),
            )
        )
    return pull_requests


def _names(
    tree: DatasetTree,
    verifications: Mapping[str, Verification],
    definitions: Sequence[str],
    op_types: Sequence[str],
) -> list[str]:
    """Selected names of verified definitions. Raises TraceproofError: one is unknown or not verified."""
    unknown = [f"definition {why(tree, name)}" for name in definitions if name not in tree.definitions]
    present = {entry.definition.op_type for entry in tree.definitions.values()}
    unknown += [f"op_type {name!r}" for name in op_types if name not in present]
    if unknown:
        raise TraceproofError(f"the dataset {tree.root} does not have", problems=unknown)
    todo = "Mend what fails; verify what was not run (`traceproof verify`), with a GPU for kernels that need one."
    reasons = {name: result.reason for name, result in verifications.items()}
    for name, entry in tree.definitions.items():
        if entry.definition.dialect is not Dialect.PUBLISHED:
            reasons[name] = "it is a trace dump, and the dataset takes definitions in its own schema alone"
    unproved = [f"{name} is not verified: {reasons[name]}" for name in definitions if reasons[name]]
    if unproved:
        raise TraceproofError("what is not verified cannot be published", problems=unproved, todo=todo)
    everything = not (definitions or op_types)
    candidates = [
        name for name, entry in tree.definitions.items() if everything or entry.definition.op_type in op_types
    ]
    names = list(dict.fromkeys([*definitions, *(name for name in candidates if not reasons[name])]))
    if not names:
        problems = [f"{name}: {reasons[name]}" for name in candidates[:NAMED]]
        what = "nothing is verified, so nothing can be published"
        raise NothingVerifiedError(what, problems=problems, todo=todo)
    return names


def _groups(tree: DatasetTree, names: Sequence[str], per: Per) -> Iterator[tuple[str, str, list[str]]]:
    """(slug, title, definitions) of each pull request."""
    if per == "all":
        yield "all", "feat: add what was verified of the dataset", list(names)
        return
    groups: dict[str, list[str]] = {}
    for name in names:
        key = name if per == "definition" else tree.definitions[name].definition.op_type
        groups.setdefault(key, []).append(name)
    for key, group in groups.items():
        of = key if per == "definition" else f"op_type {key}"
        yield f"{per}-{key}", f"feat: add what was verified of {of}", group


def _parts(source: Source) -> Path:
    """The folder with `<definition>/` of each, from `write_solutions`."""
    return source.run / "publish" / "parts"


def _write_solutions(
    source: Source, tree: DatasetTree, verdicts: Mapping[str, Verdicts], verifications: Mapping[str, Verification]
) -> None:
    """Make all definitions' solutions in one process, as importing torch takes longer than most of them."""
    requests = []
    for name, of_definition in verdicts.items():
        versions = {
            truth: of_definition[truth].versions.get(distribution(STACK_OF[truth]))
            for truth in verifications[name].truths
        }
        cases = {"cases": of_definition[REFERENCE].cases, "infinite": of_definition[REFERENCE].infinite}
        about = {"definition": name, "op_type": tree.definitions[name].definition.op_type}
        requests.append({**about, "plans": str(source.run / "cases"), "versions": versions, **cases})
    with own_folder() as folder:
        write_json(folder / "request.json", requests)
        command = [source.python, "-P", "-m", "traceproof.publish.solutions", str(folder / "request.json")]
        environment = without_secrets() | {"PYTHONPATH": str(source.root / "src")}
        done = programs.run([*command, str(_parts(source))], environment=environment)
    if done.returncode:
        messages = programs.last_lines(done.stderr)
        raise TraceproofError("baselines and workloads could not be made", problems=messages)


def _write_tests(source: Source, tree: DatasetTree, names: Sequence[str]) -> dict[str, str]:
    """Write tests of the definitions below `<run>/publish/tests`; returns why some get none, by definition.

    Tests that the run generated are taken with their settings; others are generated. Raises TraceproofError: that
    fails.
    """
    out = source.run / "publish" / "tests"
    folder, target = tree.root / PLACE, fresh_folder(out, within=out.parent) / PLACE
    if state(folder / "conftest.py") == "foreign":
        return dict.fromkeys(names, f"no tests: {PLACE / 'conftest.py'} of the dataset is another's")
    tested = [name for name in names if state(folder / f"test_{name}.py") == "foreign"]
    fresh = tuple(name for name in names if name not in tested)
    for path in (source.run / GENERATED / PLACE / f"test_{name}.py" for name in fresh):
        if state(path) == "ours":
            write_text(target / path.name, path.read_text(encoding="utf-8"))
    if fresh:
        order = GenerateOptions(root=tree.root, out=out, definitions=fresh, python=source.python)
        generate(order, Divergences(), planned=True)
    return {name: f"no generated test, the dataset has {PLACE / f'test_{name}.py'}" for name in tested}


def _files(
    source: Source, tree: DatasetTree, entry: DatasetEntry, tagged: Definition, solution: str | None
) -> dict[str, bytes]:
    """All files for a definition: itself with derived tags, solution, workloads, blobs, tests and traces."""
    op_type, name = tagged.op_type, tagged.name
    value = strict_json(file_text(tree.root / entry.path, tree.root)) | {"tags": list(tagged.tags)}
    if tagged.constraints is None:  # null means the same, and flashinfer-bench refuses it
        value.pop("constraints", None)
    files = {f"definitions/{op_type}/{name}.json": json_text(value).encode()}
    parts, tests = _parts(source) / path_part(name), source.run / "publish" / "tests"
    for pattern in (
        f"solutions/{BASELINE}/{op_type}/{name}/*.json",
        f"workloads/{op_type}/{name}.jsonl",
        f"blob/workloads/{op_type}/{name}/*",
    ):
        files |= {path.relative_to(parts).as_posix(): path.read_bytes() for path in parts.glob(pattern)}
    if (tests / PLACE / f"test_{name}.py").is_file():
        for path in (tests / PLACE / f"test_{name}.py", tests / PLACE / "conftest.py"):
            files[path.relative_to(tests).as_posix()] = path.read_bytes()
    for folder in source.traces:
        # where flashinfer-bench's benchmark leaves them, and where the dataset keeps them, by the solution's
        # author
        for path in (folder / f"traces/{op_type}/{name}.jsonl", folder / traces_path(tagged)):
            lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else ()
            # what is no trace is taken along, so that it is told as a problem
            ours = b"".join(line for line in lines if _identity(line)[1] in {solution, ""})
            if solution and ours.strip():
                files[traces_path(tagged)] = joined(files.get(traces_path(tagged), b""), ours)
    return files


def _tests(run: Path, definitions: Mapping[str, Definition]) -> str:
    """The run's results of generated tests for these definitions, as text; empty: they were not run."""
    digests = {name: definition.digest for name, definition in definitions.items()}
    return described(kept_json(run / TESTS).get("rows", ()), digests, digests)


def dry_run_text(listed: Path, selection: str) -> str:
    """A dry run's result as text, from its list, with the command that would send it."""
    text = f"Pull requests that a push would open (dry run, in {listed.parent}):\n"
    pull_requests = json.loads(listed.read_bytes())
    for made in pull_requests:
        problems = f"; not as it is: {'; '.join(made['problems'])}" if made["problems"] else ""
        text += f"  {made['pull_request']}: {len(made['files'])} files{problems}\n"
    text += "" if pull_requests else "  none: nothing selected is verified by a ground truth that runs here\n"
    chosen = f" --selection {selection}" if selection else ""
    return f"{text}Nothing was sent. To open them: traceproof publish{chosen} --push\n"


def dry_run(made: PullRequest, base: Base, out: Path, *, allow_changes: bool = False) -> dict[str, Any]:
    """Write the files of a push, their list and the description below `out`; returns the list.

    Its `problems` say why it can not be sent. Raises TraceproofError: the folder can not be written.
    """
    change = resolve(made.files, base, allow_changes=allow_changes)
    folder = fresh_folder(out / path_part(made.slug), within=out)
    files = []
    for path, data in sorted(change.files.items()):
        target = folder / "files" / path
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        files.append({"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    listed = {"pull_request": made.slug, "title": made.title, "base": base.revision, "files": files}
    listed |= {"unchanged": sorted(change.same), "kept": sorted(change.kept), "problems": change.problems}
    write_json(folder / "files.json", listed)
    write_text(folder / "description.md", made.describe(change))
    write_json(folder / "coverage.json", [row._asdict() for row in made.models])
    return listed


def checked(made: PullRequest, base: Base, *, allow_changes: bool) -> Change:
    """Compare a pull request with a base. Raises TraceproofError: it can not be sent."""
    change = resolve(made.files, base, allow_changes=allow_changes)
    if change.problems:
        todo = "Nothing was sent. If the changes listed are meant, give --allow-changes."
        what = f"{made.slug} cannot be published on top of {base.revision}"
        raise TraceproofError(what, problems=change.problems, todo=todo)
    return change


def base_of(source: Source) -> Folder:
    """The published dataset, on this machine."""
    return Folder(source.base or source.dataset)


def provenance(root: Path, dataset: Dataset) -> dict[str, str]:
    """Origins of a run: the dataset, traceproof's commit, and the pins of `sources.lock`."""
    try:
        commit = Git(root).local("describe", "--always", "--dirty", "--abbrev=40", "--match=").strip()
    except GitError:
        commit = ""
    pins = kept_json(root / "sources.lock").get("sources", {})
    pinned = {name: str(pin.get("commit") or pin.get("version") or "") for name, pin in sorted(pins.items())}
    return {
        "dataset": origin_of(dataset),
        "traceproof": commit,
        **{f"pinned {name}": value for name, value in pinned.items()},
    }


def origin_of(dataset: Dataset) -> str:
    """Where a dataset comes from, as text."""
    if dataset.pypi is not None:
        return f"{dataset.pypi.package} {dataset.pypi.version}"
    if dataset.git is not None:
        return f"{redacted(dataset.git.url)} {dataset.git.commit}"
    return "a local folder"

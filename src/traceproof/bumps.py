"""What a source's new commit or version changed, and which commit changed it: kept verdicts, diffs, bisection.

Verdicts are kept in a file per state, which is a set of pins and environments. Of a bisection's commits only those
that touch the package are candidates, and few are run; a trial runs the ground truths of one stack on some
definitions, with the package of a given folder.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock
from pydantic_core import from_json, to_json

from traceproof import programs
from traceproof.checkouts.gitrun import Git
from traceproof.checkouts.pins import Pin, lock_digest
from traceproof.checkouts.sources import changed_between
from traceproof.dataset.tree import paused_collection
from traceproof.digests import digest_bytes, digest_json, verdict_code
from traceproof.environments.building import of_package, probe, source_paths
from traceproof.errors import TraceproofError
from traceproof.files import sealed, write_text
from traceproof.ops import registry
from traceproof.programs import without_secrets
from traceproof.reasons import WORST_FIRST, Skip, Verdict
from traceproof.run.flow import Pipeline
from traceproof.run.schema import (
    IMPLEMENTATIONS,
    PAIR,
    WHOLE,
    VerdictRow,
    each_row,
    environment_of,
    files_of,
    for_op_type,
)
from traceproof.stacks import MAIN, distribution, truths_of

CommitVerdict = dict[str, Any]  # `verdict`, the worst, and `rows`
MESSAGES = 3  # messages of a verdict that are shown if both ends have the same


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBad:
    """Result of a bisection."""

    commit: str  # the first commit with the bad verdict, unless one in `doubtful` is
    doubtful: tuple[str, ...]  # commits right before it that could not be judged
    # good, bad: the verdicts at both ends
    good: CommitVerdict
    bad: CommitVerdict
    # numbers of commits between the ends, of those that touch the package, and of those that were run
    commits: int
    touching: int
    tried: int
    parts: tuple[str, ...]  # files of the package that it changed


def commits_between(repository: Path, good: str, bad: str) -> list[str]:
    """Commits after `good` up to `bad`, oldest first. Raises TraceproofError: `good` does not precede `bad`."""
    ends = [Git(repository).commit(end) for end in (good, bad)]
    base = Git(repository).local("merge-base", *ends).strip()
    if base != ends[0] or ends[0] == ends[1]:
        raise TraceproofError(f"--good {good} does not come before --bad {bad}")
    listed = Git(repository).local("rev-list", "--reverse", "--first-parent", f"{ends[0]}..{ends[1]}")
    return listed.split()


@dataclass
class Bisection:
    """A search for the first bad commit."""

    repository: Path  # a clone of the source, with all commits
    # stack, op_type: of the ground truth
    stack: str
    op_type: str
    # returns the verdict at a commit; called once per content of the package
    judge: Callable[[str], CommitVerdict]
    report: Callable[[str], None]  # called with a line per step
    _verdicts: dict[str, CommitVerdict] = field(default_factory=dict)

    def search(self, good: str, bad: str) -> FirstBad:
        """Find the first bad commit. Raises TraceproofError: both ends have one verdict, or nothing changed."""
        commits = commits_between(self.repository, good, bad)
        steps = self._touching([Git(self.repository).commit(good), *commits])
        self.report(f"{len(commits)} commits, {len(steps) - 1} of them touch the package of {self.stack}")
        if len(steps) == 1:
            what = f"no commit between {good} and {bad} touches what {self.op_type} of {self.stack} depends on"
            todo = "The verdicts differ by something else: the environment, the device, or the definition."
            raise TraceproofError(what, todo=todo)
        first, last = self._verdict(*steps[0]), self._verdict(*steps[-1])
        if first["verdict"] == last["verdict"]:
            messages = sorted({str(row["message"]) for row in last.get("rows", ()) if row.get("message")})
            what = f"the verdict is {first['verdict']!r} at both ends: {good} and {bad}"
            todo = "Give ends that differ; `traceproof diff` shows what changed between two kept states."
            raise TraceproofError(what, problems=messages[:MESSAGES], todo=todo)
        index, doubtful = self._narrow(steps, first["verdict"], last["verdict"])
        ends = steps[index - 1 - len(doubtful)][0], steps[index][0]
        return FirstBad(
            commit=steps[index][0],
            doubtful=tuple(steps[at][0] for at in doubtful),
            good=first,
            bad=last,
            commits=len(commits),
            touching=len(steps) - 1,
            tried=len(self._verdicts),
            parts=tuple(name for name in changed_between(self.repository, *ends) if of_package(self.stack, name)),
        )

    def _touching(self, commits: Sequence[str]) -> list[tuple[str, str]]:
        """The first commit, and each later one that changes the package; with a digest of the content."""
        steps: list[tuple[str, str]] = []
        for commit in commits:
            listed = Git(self.repository).local("ls-tree", "--full-tree", commit, *source_paths(self.stack))
            content = digest_bytes(listed.encode())  # git's own digests, also of submodules
            if not steps or content != steps[-1][1]:
                steps.append((commit, content))
        return steps

    def _narrow(self, steps: Sequence[tuple[str, str]], good: str, bad: str) -> tuple[int, list[int]]:
        """Index of the first bad step, and of the steps right before it that are neither good nor bad."""
        low, high = 0, len(steps) - 1
        neither: set[int] = set()
        while True:
            inside = [at for at in range(low + 1, high) if at not in neither]
            if not inside:
                return high, sorted(at for at in neither if low < at < high)
            middle = min(inside, key=lambda at: abs(at - (low + high) / 2))
            verdict = self._verdict(*steps[middle])["verdict"]
            if verdict == bad:
                high = middle
            elif verdict == good:
                low = middle
            else:
                neither.add(middle)

    def _verdict(self, commit: str, content: str) -> CommitVerdict:
        if content not in self._verdicts:
            self._verdicts[content] = self.judge(commit)
            self.report(f"{commit[:12]} {self._verdicts[content]['verdict']}")
        return self._verdicts[content]


@dataclass(frozen=True, kw_only=True)
class GroundTruthTrial:
    """Definitions of one op_type and the ground truths of one stack: planned once, judged per package."""

    flow: Pipeline  # the configuration
    root: Path  # repository of traceproof
    # definitions, op_type, stack: what is run
    definitions: tuple[str, ...]
    op_type: str
    stack: str
    work: Path  # folder for plans, verdicts and compiled kernels
    variables: Mapping[str, str] = field(default_factory=dict)  # environment variables for all processes
    truths: tuple[str, ...] = ()  # ground truths to run; empty: all of the stack

    def rows(self, package: Path | None, name: str) -> list[VerdictRow]:
        """Rows of the ground truths in `package`; None: the installed one.

        `name` is a folder name for this trial. Raises TraceproofError: it could not be judged.
        """
        environment = self._environment(self.stack, package) | {"variables": dict(self.variables)}
        implementations = for_op_type(self.op_type)
        options = {
            "cache": self.work / "cache.sqlite",
            "caches": self.work / "compiled",
            "environments": json.dumps({MAIN: self._main, self.stack: environment}),
            "code": verdict_code(registry.file_of(self.op_type)),
            "implementations": [who for who in self.truths or truths_of(self.stack) if who in implementations],
            "limits": self.flow.limits(),
            "build-seconds": self.flow.config.limits.build_s,
            "tolerance": self.flow.tolerance,
        }
        found: list[VerdictRow] = []
        for cases in self._cases:
            verdicts = self.work / name / f"{cases.stem}.jsonl"
            self._run("verify", {**options, "cases": cases, "verdicts": verdicts})
            found += each_row(verdicts)
        return found

    @cached_property
    def _cases(self) -> list[Path]:
        """Files of the op_type's cases, which the job `cases` plans for the bisected definitions alone."""
        selection = {**json.loads(self.flow.selection), "op_types": [], "definitions": list(self.definitions)}
        stack, out = self.work / f"{MAIN}.json", self.work / "cases" / "index.json"
        write_text(stack, sealed(json.dumps(self._main["record"], indent=1)))
        where = {"dataset": self.flow.dataset, "stack": stack, "out": out}
        self._run(
            "cases", {**where, "selection": json.dumps(selection), "foreign": json.dumps(registry.foreign())}
        )
        return files_of(out.parent, self.op_type)

    @cached_property
    def _main(self) -> dict[str, Any]:
        return self._environment(MAIN, None)

    def _environment(self, stack: str, package: Path | None) -> dict[str, Any]:
        """An environment in the form of the job `verify`."""
        path = [] if package is None else [package]
        record = probe(self.flow.stacks[stack], root=self.root, path=path)
        return {"python": str(self.root / self.flow.python(stack)), "record": record, "path": list(map(str, path))}

    def _run(self, job: str, options: Mapping[str, object]) -> None:
        """Run a job script with the main stack's interpreter. Raises TraceproofError: it fails."""
        script = str(self.root / "scripts" / "stack_job.py")
        arguments = ["-P", script, job, "--log", str(self.work / f"{job}.log")]
        for key, value in options.items():
            arguments += [f"--{key}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        command = [str(self.root / self.flow.python(MAIN)), *arguments]
        environment = {**without_secrets(), **self.variables, "PYTHONPATH": str(self.root / "src")}
        done = programs.run(command, environment=environment, cwd=self.root)
        if done.returncode:
            what = f"{self.op_type}: {' '.join(command[:3])} ... ended with {done.returncode}"
            raise TraceproofError(what, problems=programs.last_lines(done.stderr))


def worst(rows: Sequence[VerdictRow]) -> str:
    """The worst verdict of some rows; `skip` only if nothing was compared."""
    verdicts = {row.verdict for row in rows}
    return str(next((verdict for verdict in WORST_FIRST if verdict in verdicts), "skip"))


# Verdicts kept per state, and what differs between two states.

# Columns of a row that are kept.
KEPT = (
    *("definition", "op_type", "case", "implementation", "output"),
    *("verdict", "reason", "message", "gate", "size", "seed", "device"),
)
Row = Mapping[str, Any]
NEWEST = {"latest": 0, "previous": 1}


@dataclass(frozen=True, slots=True)
class Kept:
    """The verdicts of one state."""

    digest: str  # of pins and environments
    # verdict rows with the columns KEPT, `dataset`, the definition's `digest`, and `whole` if the run was not
    # limited to some cases
    rows: tuple[Row, ...]
    about: Mapping[str, Any]  # `pins`, `stacks` (versions by stack), `time`, and more of the file


@dataclass(frozen=True, slots=True)
class Scope:
    """What a run covered."""

    dataset: str = ""  # the dataset, whatever its version
    whole: bool = True  # whether all cases of the planned sizes ran, or only some named ones


def keep(
    folder: Path,
    verdicts: Mapping[Path, str],
    stacks: Sequence[Mapping[str, Any]],
    pins: Mapping[str, Pin],
    scope: Scope = Scope(),
) -> str:
    """Keep a run's verdicts, files with their digests, in the file of its state; returns the state's digest.

    A second run in the same state, for example of another selection, adds to the file: its rows replace those of
    what it covered, and those of definitions' texts that the dataset no longer has. Raises TraceproofError: the
    disk is full.
    """
    pinned = {name: pin.model_dump(mode="json", exclude_none=True) for name, pin in pins.items()}
    environments = {str(stack["stack"]): str(stack["digest"]) for stack in stacks}
    files = {str(path): digest_json([verdicts[path], *astuple(scope)]) for path in sorted(verdicts)}
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"), paused_collection(kept=True):  # runs of other selections write the same file
        before = _same(folder, pinned, environments)
        # Files that the last run in this state kept are left as they are. `report` has checked all of them.
        changed = [Path(name) for name, state in files.items() if before.get("files", {}).get(name) != state]
        new = [_cut(from_json(line), scope) for path in changed for line in path.read_bytes().splitlines()]
        digest = before.get("digest") or digest_json([lock_digest(pins), sorted(map(list, environments.items()))])
        rows = [*_untouched(before.get("rows", []), new, scope), *new]
        value = {
            "digest": digest,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "files": files,
            "pins": pinned,
            "environments": before.get("environments", {}) | environments,
            "stacks": before.get("stacks", {}) | {stack["stack"]: stack["versions"] for stack in stacks},
        }
        write_text(folder / f"{digest}.json", to_json({**value, "rows": rows}).decode())
    return digest


def _same(folder: Path, pins: Mapping[str, Any], environments: Mapping[str, str]) -> dict[str, Any]:
    """Content of the newest kept file of this state; {}: there is none. An unreadable file is reported.

    A run has only its op_types' environments: two runs are in one state if the environments of both agree.
    """
    for path in states(folder):
        try:
            about = dict(load(path).about)
        except TraceproofError as error:
            sys.stderr.write(f"what was kept of earlier runs in {path} is lost: {error}\n")
            continue
        known = about.get("environments", {})
        if about.get("pins") == pins and all(known.get(name, new) == new for name, new in environments.items()):
            return about
    return {}


def _cut(row: Row, scope: Scope) -> dict[str, Any]:
    kept = {key: row[key] for key in KEPT if row.get(key) is not None}
    digest = row.get("digests", {}).get("definition")
    return kept | {"dataset": scope.dataset, "whole": scope.whole} | ({"digest": digest} if digest else {})


def _untouched(old: Iterable[Row], new: Sequence[Row], scope: Scope) -> list[Row]:
    """The old rows that a run does not replace."""

    def unit(row: Row) -> tuple[Any, ...]:
        """What is replaced together: all cases of a size, or one case."""
        part = row.get("size") if scope.whole else row.get("case")
        return row.get("dataset"), row["definition"], row["implementation"], row.get("seed"), part

    covered = set(map(unit, new))
    texts = {(row.get("dataset"), row["definition"]): row.get("digest") for row in new if row.get("digest")}
    kept = [row for row in old if unit(row) not in covered]
    return [row for row in kept if texts.get((row.get("dataset"), row["definition"])) in {None, row.get("digest")}]


def states(folder: Path) -> list[Path]:
    """Files of the kept states, newest first."""
    return sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)


def load(path: Path) -> Kept:
    """The state in a file. Raises TraceproofError: it has none."""
    try:
        value = from_json(path.read_bytes())
        return Kept(value["digest"], tuple(value["rows"]), value)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceproofError(f"{path} holds no kept verdicts: {error}") from error


def find(folder: Path, name: str) -> Kept:
    """A kept state, by the start of its digest, `latest`, `previous`, or a file.

    Raises TraceproofError: there is none, or several.
    """
    if Path(name).is_file():
        return load(Path(name))
    files = states(folder)
    if name in NEWEST:
        matching = files[NEWEST[name] : NEWEST[name] + 1]
    else:
        matching = [path for path in files if path.stem.startswith(name)]
    if len(matching) == 1:
        return load(matching[0])
    if not files:
        raise TraceproofError(f"no verdicts are kept in {folder}", todo="Run `traceproof verify` first.")
    if name == "previous" and len(files) == 1:
        what = f"there is nothing to compare: one state is kept, {files[0].stem}"
        todo = "Bump a source or an environment and verify again: a state is one set of pins and environments."
        raise TraceproofError(what, todo=todo)
    problems = [path.stem for path in matching or files][:10]
    todo = "Give the start of one digest, latest, previous, or a file. `traceproof verify` keeps one per state."
    raise TraceproofError(f"{len(matching) or 'no'} kept states are called {name!r}", problems=problems, todo=todo)


# The difference between two kept states.

BAD = frozenset({Verdict.FAIL, Verdict.ERROR})
MOVED = 2.0  # factor; kernels that add in another order differ by some tenths
FLOOR = 0.05  # of the gate's limit; smaller margins are noise of the last bits

# The kinds of changes, attributes of Diff, in words.
TITLES: Mapping[str, str] = {
    "failing": "newly failing",
    "skipped": "newly skipped",
    "vanished_rows": "passed before and is gone",
    "passing": "newly passing",
    "moved": "margin moved",
}

Key = tuple[str, str, str, str]  # definition's text, case and seed, implementation, output


def verdict_text(row: Row | None) -> str:
    """A row in words: its verdict with its margin, the share of the limit that it used, or with its reason."""
    if row is None:
        return "absent"
    margin = _margin(row)
    if isinstance(margin, int | float):
        return f"{row['verdict']} (margin {margin:.3g})"
    return f"{row['verdict']} ({row['reason']})" if row.get("reason") else str(row["verdict"])


@dataclass(frozen=True, slots=True)
class Diff:
    """Changes between two states, as (row before, row after) by kind; None: there was no row."""

    # before, after: the states
    before: Kept
    after: Kept
    failing: list[tuple[Row | None, Row]] = field(default_factory=list)
    passing: list[tuple[Row, Row]] = field(default_factory=list)
    skipped: list[tuple[Row, Row]] = field(default_factory=list)
    moved: list[tuple[Row, Row]] = field(default_factory=list)
    vanished_rows: list[tuple[Row, None]] = field(default_factory=list)
    new_apis: list[str] = field(default_factory=list)
    vanished_apis: list[str] = field(default_factory=list)

    @property
    def worse(self) -> bool:
        """Whether something fails, is skipped or is missing that was not so before."""
        return bool(self.failing or self.skipped or self.vanished_apis or self.vanished_rows)

    @property
    def versions(self) -> Iterator[str]:
        """A line per package whose version changed in a stack."""
        for stack, versions in self.after.about["stacks"].items():
            was = self.before.about["stacks"].get(stack, {})
            for name in sorted({*versions, *was}):
                if versions.get(name) != was.get(name):
                    yield f"{stack}: {name} {was.get(name)} -> {versions.get(name)}"

    def between(self, was: Row | None, row: Row | None) -> str:
        """Text such as `fixed between flashinfer-python 0.6.13 and 0.7.2`, or `broken ...`; "": neither."""
        old, new = (None if side is None else side["verdict"] for side in (was, row))
        how = "fixed" if new == Verdict.PASS and old in BAD else "broken"
        if how == "broken" and not (old == Verdict.PASS and new in BAD):
            return ""
        changes = []
        for implementation in str((row or was or {})["implementation"]).split(PAIR):
            stack = environment_of(implementation) if implementation in IMPLEMENTATIONS else implementation
            package = distribution(stack)
            versions = (state.about["stacks"].get(stack, {}).get(package) for state in (self.before, self.after))
            before, after = versions
            if before is not None and after is not None and before != after:
                changes.append(f"{how} between {package} {before} and {after}")
        return ", ".join(changes)

    def as_json(self) -> dict[str, Any]:
        """All changes, as JSON."""
        changes = {
            name: [{"before": a, "after": b, "between": self.between(a, b)} for a, b in getattr(self, name)]
            for name in TITLES
        }
        return {"worse": self.worse, **changes, "new_apis": self.new_apis, "vanished_apis": self.vanished_apis}

    def take(self, was: Row | None, row: Row) -> None:
        """Add a row under its kind of change, given the row before, if there is one."""
        verdict, before = row["verdict"], was["verdict"] if was is not None else None
        if verdict in BAD and before not in BAD:
            self.failing.append((was, row))
        elif was is None:
            return
        elif verdict == Verdict.SKIP and before != Verdict.SKIP:
            self.skipped.append((was, row))
        elif verdict == Verdict.PASS and before != Verdict.PASS:
            self.passing.append((was, row))
        else:
            margins = [margin for side in (was, row) if isinstance(margin := _margin(side), int | float)]
            low, high = min(margins, default=0.0), max(margins, default=0.0)
            if len(margins) == 2 and max(high, FLOOR) / max(low, FLOOR) >= MOVED:
                self.moved.append((was, row))


def diff(before: Kept, after: Kept) -> Diff:
    """Compare two states by definition, case, seed, implementation and output.

    What only one of them ran is left out: datasets, definitions, cases, implementations. Definitions with the same
    text are the same in any dataset; if the text changed, name and dataset identify it.
    """
    old, new = _by_key(before.rows, _text), _by_key(after.rows, _text_before(before.rows))
    delta = Diff(before, after)
    ran = {key[:3] for key in old}
    for key, row in new.items():
        if key[:3] in ran:
            delta.take(_before(old, key), row)
    delta.vanished_rows.extend((row, None) for row in _vanished(old, new))
    delta.vanished_apis.extend(sorted({_api(row) for _, row in delta.skipped if row["reason"] == Skip.API_ABSENT}))
    appeared = set()
    for key, row in old.items():
        if row.get("reason") == Skip.API_ABSENT:
            # The case may have been skipped as a whole: any of its outputs counts.
            now = new.get(key) or next((now for place, now in new.items() if place[:3] == key[:3]), {})
            appeared |= {_api(row)} if now.get("verdict") in {Verdict.PASS, *BAD} else set()
    delta.new_apis.extend(sorted(appeared))
    return delta


def _text(row: Row) -> str:
    """A definition's text, identified by name, dataset and digest."""
    return f"{row['definition']} {row.get('dataset')} {row.get('digest')}"


def _text_before(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Prepare to match texts; returns the function from a row after to the text before (by default its own)."""
    by_digest = {(row["definition"], row["digest"]): _text(row) for row in rows if "digest" in row}
    by_dataset = {(row["definition"], row.get("dataset")): _text(row) for row in rows}

    def matching(row: Row) -> str:
        name, text = row["definition"], _text(row)
        same = by_dataset.get((name, row.get("dataset")))
        return text if text == same else by_digest.get((name, row.get("digest")), same or text)

    return matching


def _vanished(old: Mapping[Key, Row], new: Mapping[Key, Row]) -> Iterator[Row]:
    """Rows that passed and are missing, although their case, or all cases of their size, ran again."""
    cases = {key[:3] for key in new}
    skipped = {key[:3] for key in new if key[3] == WHOLE}
    sizes = {(key[0], key[2], row.get("size"), row.get("seed")) for key, row in new.items() if row.get("whole")}
    for key, row in old.items():
        again = key[:3] in cases or (key[0], key[2], row.get("size"), row.get("seed")) in sizes
        if key not in new and again and key[:3] not in skipped and row["verdict"] == Verdict.PASS:
            yield row


def _by_key(rows: Iterable[Row], series: Callable[[Row], str]) -> dict[Key, Row]:
    by_key: dict[Key, Row] = {}
    for row in rows:
        key = (series(row), f"{row.get('case')} {row.get('seed')}", str(row["implementation"]), str(row["output"]))
        # Of several rows about a whole case (conduct), the worst one counts.
        if key not in by_key or row["verdict"] in BAD:
            by_key[key] = row
    return dict(sorted(by_key.items()))


def _before(old: Mapping[Key, Row], key: Key) -> Row | None:
    """The row before; a whole case and its outputs match each other, since a skipped case has no outputs."""
    if key in old:
        return old[key]
    if key[3] != WHOLE:
        return old.get((*key[:3], WHOLE))
    return next((row for place, row in old.items() if place[:3] == key[:3]), None)


def _margin(row: Row) -> object:
    return (row.get("gate") or {}).get("margin")


def _api(row: Row) -> str:
    return f"{row['implementation']}: {row['message']}"

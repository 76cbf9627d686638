"""The first commit that changed a verdict: only commits that touch the package are candidates, and few are run.

A trial runs the ground truths of one stack on some definitions, with the package of a given folder.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from traceproof import programs
from traceproof.checkouts.gitrun import Git
from traceproof.checkouts.tree import changed_between
from traceproof.digests import digest_bytes, verdict_code
from traceproof.environments.building import of_package, probe, source_paths
from traceproof.errors import TraceproofError
from traceproof.files import sealed, write_text
from traceproof.ops import registry
from traceproof.programs import without_secrets
from traceproof.reasons import WORST_FIRST
from traceproof.run.flow import Pipeline
from traceproof.run.schema import VerdictRow, each_row, for_op_type
from traceproof.stacks import MAIN, truths_of

Verdict = dict[str, Any]
MESSAGES = 3  # messages of a verdict that are shown if both ends have the same


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBad:
    """Result of a bisection."""

    commit: str  # the first commit with the bad verdict, unless one in `doubtful` is
    doubtful: tuple[str, ...]  # commits right before it that could not be judged
    # good, bad: the verdicts at both ends
    good: Verdict
    bad: Verdict
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
    judge: Callable[[str], Verdict]  # returns the verdict at a commit; called once per content of the package
    report: Callable[[str], None]  # called with a line per step
    _verdicts: dict[str, Verdict] = field(default_factory=dict)

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

    def _verdict(self, commit: str, content: str) -> Verdict:
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
        """Verdict rows of the ground truths in `package`; None: the installed one.

        `name` is a folder name for this trial. Raises TraceproofError: it could not be judged.
        """
        environment = self._environment(self.stack, package) | {"variables": dict(self.variables)}
        implementations = for_op_type(self.op_type)
        verdicts = self.work / name / "verdicts.jsonl"
        options = {
            "cases": self._cases,
            "verdicts": verdicts,
            "cache": self.work / "cache.sqlite",
            "caches": self.work / "compiled",
            "environments": json.dumps({MAIN: self._main, self.stack: environment}),
            "code": verdict_code(registry.file_of(self.op_type)),
            "implementations": [who for who in self.truths or truths_of(self.stack) if who in implementations],
            "limits": self.flow.limits(),
            "build-seconds": self.flow.config.limits.build_s,
            "tolerance": self.flow.tolerance,
        }
        self._run("verify", options)
        return [*each_row(verdicts)]

    @cached_property
    def _cases(self) -> Path:
        """File of the op_type's cases, which the job `cases` plans for the bisected definitions alone."""
        selection = {**json.loads(self.flow.selection), "op_types": [], "definitions": list(self.definitions)}
        stack, out = self.work / f"{MAIN}.json", self.work / "cases" / "index.json"
        write_text(stack, sealed(json.dumps(self._main["record"], indent=1)))
        where = {"dataset": self.flow.dataset, "stack": stack, "out": out}
        self._run("cases", {**where, "selection": json.dumps(selection)})
        return out.with_name(f"{self.op_type}.json")

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

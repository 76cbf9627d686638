"""The first commit that changed a verdict: only commits that touch the package count, and few of those run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceproof.checkouts.gitrun import Git
from traceproof.checkouts.tree import changed_between
from traceproof.digests import digest_bytes
from traceproof.environments.package import of_package, source_paths
from traceproof.errors import TraceproofError

Verdict = dict[str, Any]
MESSAGES = 3  # of a verdict, shown where both ends have the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a bisection found."""

    commit: str  # the first one with the bad verdict; with `doubtful`, it or one of those
    doubtful: tuple[str, ...]  # commits before it that could not be judged
    # good, bad: the verdicts at the two ends
    good: Verdict
    bad: Verdict
    commits: int  # how many were in question; `touching` of them touch the package; `tried` were run
    touching: int
    tried: int
    parts: tuple[str, ...]  # files of the package that it changed


def commits_between(repository: Path, good: str, bad: str) -> list[str]:
    """Commits after `good` up to `bad`, oldest first. Raises TraceproofError: `good` does not come first."""
    ends = [Git(repository).commit(end) for end in (good, bad)]
    base = Git(repository).local("merge-base", *ends).strip()
    if base != ends[0] or ends[0] == ends[1]:
        raise TraceproofError(f"--good {good} does not come before --bad {bad}")
    listed = Git(repository).local("rev-list", "--reverse", "--first-parent", f"{ends[0]}..{ends[1]}")
    return listed.split()


@dataclass
class Bisection:
    """A search."""

    repository: Path  # a clone of the source, with the commits in question
    # stack, op_type: whose ground truth
    stack: str
    op_type: str
    judge: Callable[[str], Verdict]  # verdict at a commit; called once for each content of the package
    report: Callable[[str], None]  # gets a line for every step
    _verdicts: dict[str, Verdict] = field(default_factory=dict)

    def search(self, good: str, bad: str) -> Found:
        """Find the first bad commit. Raises TraceproofError: equal verdicts at the ends, or nothing changed."""
        commits = commits_between(self.repository, good, bad)
        steps = self._touching([Git(self.repository).commit(good), *commits])
        self.report(f"{len(commits)} commits, {len(steps) - 1} of them touch the package of {self.stack}")
        if len(steps) == 1:
            raise TraceproofError(
                f"no commit between {good} and {bad} touches what {self.op_type} of {self.stack} depends on",
                todo="The verdicts differ by something else: the environment, the device, or the definition.",
            )
        first, last = self._verdict(*steps[0]), self._verdict(*steps[-1])
        if first["verdict"] == last["verdict"]:
            said = sorted({str(row["message"]) for row in last.get("rows", ()) if row.get("message")})
            raise TraceproofError(
                f"the verdict is {first['verdict']!r} at both ends: {good} and {bad}",
                problems=said[:MESSAGES],
                todo="Give ends that differ; `traceproof diff` shows what changed between two kept states.",
            )
        index, doubtful = self._narrow(steps, first["verdict"], last["verdict"])
        ends = steps[index - 1 - len(doubtful)][0], steps[index][0]
        return Found(
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
        """The first commit, and each one that changes the package, with the digest of its content."""
        steps: list[tuple[str, str]] = []
        for commit in commits:
            listed = Git(self.repository).local("ls-tree", "--full-tree", commit, *source_paths(self.stack))
            content = digest_bytes(listed.encode())  # git's own digests, of submodules too
            if not steps or content != steps[-1][1]:
                steps.append((commit, content))
        return steps

    def _narrow(self, steps: Sequence[tuple[str, str]], good: str, bad: str) -> tuple[int, list[int]]:
        """Index of the first bad step, and the steps right before it that are neither good nor bad."""
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

"""`traceproof bisect`: the first commit of a source that changed a definition's verdict."""

import contextlib
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Self

import typer

from traceproof.bumps.bisect import Bisection, Found, Trial, Verdict, worst
from traceproof.checkouts.gitrun import Git, GitError
from traceproof.checkouts.tree import CommitTree
from traceproof.cli import options, run
from traceproof.cli.interpreter import say
from traceproof.dataset.fetch import fetch
from traceproof.dataset.tree import find, read_tree
from traceproof.environments.package import importable, op_types, stack_of
from traceproof.errors import TraceproofError
from traceproof.run.flow import Pipeline
from traceproof.stacks import PACKAGES

PARTS_SHOWN = 10


def bisect(  # noqa: PLR0913 - one parameter per option
    *,
    definition: Annotated[str, typer.Option(help="A definition's name.")],
    good: Annotated[str, typer.Option(help="A commit, tag or branch with the one verdict.")],
    bad: Annotated[str, typer.Option(help="A later one with the other verdict.")],
    repository: Annotated[Path, typer.Option(help="A clone of FlashInfer, SGLang or Flash Linear Attention.")],
    dataset: options.Dataset = None,
    json_file: options.JsonFile = None,
) -> None:
    """Find the first commit whose ground truth has another verdict; commits that touch nothing relevant never run.

    Exit codes: 0 found, 2 bad use, or the ends do not differ.
    """
    root, config = run.configured(dataset=run.dataset_in(dataset))
    flow = Pipeline(config, root)
    folder = fetch(flow.config.dataset, root=root / flow.config.results / "dataset")
    op_type = find(read_tree(folder), definition).definition.op_type
    repository = _clone(repository.expanduser().resolve())
    stack = stack_of(CommitTree(repository, bad))
    if stack is None or op_type not in op_types(stack):
        raise TraceproofError(
            f"{repository} has no ground truth of {op_type}: {'no known package' if stack is None else stack}",
            todo=f"Give a clone of one of {', '.join(PACKAGES)}.",
        )
    answer = _searched(flow, repository, good, bad, definition=definition, op_type=op_type, stack=stack)
    subject = Git(repository).local("log", "-1", "--format=%h %an %as %s", answer.commit).strip()
    told = {name: value for name, value in asdict(answer).items() if name not in {"good", "bad"}}
    ends = {"before": answer.good["verdict"], "after": answer.bad["verdict"]}
    run.write_result(json_file, {**told, "subject": subject, **ends})
    if str(json_file) != "-":
        _show(answer, subject, stack)


def _clone(folder: Path) -> Path:
    """A repository's top folder. Raises TraceproofError: it is none, whatever repository it lies in."""
    todo = f"Give a clone with its history: git clone URL FOLDER, of one of {', '.join(PACKAGES)}."
    if not folder.is_dir():
        raise TraceproofError(f"--repository {folder}: there is no such folder", todo=todo)
    inside = Git(folder).local("rev-parse", "--show-prefix").strip()
    if inside:
        top = Git(folder).local("rev-parse", "--show-toplevel").strip()
        problem = f"it is a folder of the repository {top}; below `sources/`, a released package has no history"
        raise TraceproofError(f"--repository {folder} is no git repository", problems=[problem], todo=todo)
    return folder


def _searched(  # noqa: PLR0913 - what is searched, and where
    flow: Pipeline, repository: Path, good: str, bad: str, *, definition: str, op_type: str, stack: str
) -> Found:
    """The first commit with the bad verdict, each state judged in a checkout beside the repository's own."""
    with (
        tempfile.TemporaryDirectory(prefix="traceproof-bisect-") as scratch,
        _Worktree(repository, Path(scratch)) as tree,
    ):
        work = Path(scratch) / "work"
        trial = Trial(
            flow=flow, root=flow.root, definitions=(definition,), op_type=op_type, stack=stack, work=work
        )

        def judge(commit: str) -> Verdict:
            tree.at(commit)
            rows = trial.rows(importable(tree.folder, stack, Path(scratch) / "linked"), commit)
            return {"verdict": worst(rows), "rows": [row.as_json() for row in rows]}

        return Bisection(repository, stack, op_type, judge, say).search(good, bad)


def _show(answer: Found, subject: str, stack: str) -> None:
    out = sys.stdout
    out.write(f"{answer.good['verdict']} became {answer.bad['verdict']} with {subject}\n")
    if answer.doubtful:
        out.write(f"  or with one of these, which could not be judged: {', '.join(answer.doubtful)}\n")
    out.write(f"  {answer.commits} commits, {answer.touching} touch the package of {stack}, ")
    out.write(f"{answer.tried} states were run\n")
    out.writelines(f"  changed: {part}\n" for part in answer.parts[:PARTS_SHOWN])


class _Worktree:
    """A checkout beside the repository's own, which is left as it is."""

    def __init__(self, repository: Path, scratch: Path) -> None:
        self.folder = scratch / "checkout"
        self._repository = repository

    def __enter__(self) -> Self:
        Git(self._repository).local("worktree", "add", "--detach", "--no-checkout", str(self.folder), "HEAD")
        return self

    def at(self, commit: str) -> None:
        """Check out a commit, submodules included."""
        Git(self.folder).local("checkout", "--quiet", "--force", "--detach", commit)
        if (self.folder / ".gitmodules").is_file():
            with contextlib.suppress(GitError):
                Git(self.folder).network("submodule", "update", "--init", "--recursive", "--depth=1")

    def __exit__(self, *_: object) -> None:
        Git(self._repository).local("worktree", "remove", "--force", "--force", str(self.folder))

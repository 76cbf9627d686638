"""`traceproof dependents`: which op_types, definitions and tests a change of a repository reaches, and why."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from traceproof.checkouts.gitrun import Git
from traceproof.checkouts.tree import CommitTree, FolderTree, Tree, changed_between
from traceproof.cli import options, run
from traceproof.dependents import Graph
from traceproof.environments.package import of_package, op_types, stack_of
from traceproof.errors import TraceproofError

SHOWN = 40  # lines of one list on the terminal; --json has all
PARTS_SHOWN = 3  # changed parts named beside an op_type


def dependents(
    *,
    root: Annotated[Path, typer.Option(help="The repository, or an unpacked package.")] = Path(),
    changed: Annotated[list[str] | None, typer.Option(help="Changed files, relative to --root.")] = None,
    between: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="Two commits: what differs between them.")
    ] = None,
    dataset: Annotated[Path | None, typer.Option(help="A dataset, to name the definitions too.")] = None,
    json_file: options.JsonFile = None,
) -> None:
    """List what depends on changed files, with the chain of why.

    Works on any Python repository; op_types are known for FlashInfer, SGLang and Flash Linear Attention.
    Exit codes: 0 answered, 2 bad use or input.
    """
    if bool(changed) == bool(between):
        raise TraceproofError("give the changed files with --changed FILE..., or two commits with --between A B")
    root = root.expanduser().resolve()
    answer = (
        _between(root, *between) if between else _changed(root, [_relative(name, root) for name in changed or []])
    )
    answer["definitions"] = _definitions(dataset, answer["op_types"])
    run.write_result(json_file, answer)
    if str(json_file) != "-":
        _show(answer)


def _relative(name: str, root: Path) -> str:
    path = Path(name)
    if path.is_absolute():
        if not path.is_relative_to(root):
            raise TraceproofError(
                f"--changed {name} does not lie in {root}", todo="Give the repository with --root."
            )
        return path.relative_to(root).as_posix()
    return path.as_posix()


def _changed(root: Path, names: list[str]) -> dict[str, Any]:
    tree = FolderTree(root)
    absent = [name for name in names if name not in tree.files]
    if absent:
        raise TraceproofError(
            f"not in {root}: {', '.join(absent)}", todo="For deleted files, compare two commits: --between A B."
        )
    return {"changed": names, **_reached(names, tree)}


def _between(root: Path, before: str, after: str) -> dict[str, Any]:
    commits = [Git(root).commit(name) for name in (before, after)]
    names = changed_between(root, *commits)
    answers = []
    for commit in commits:  # a file may be reached only before the change, or only after it: both count
        tree = CommitTree(root, commit)
        answers.append(_reached([name for name in names if name in tree.files], tree))
        tree.close()
    old, new = answers
    return {
        "stack": new["stack"] or old["stack"],
        "commits": commits,
        "changed": names,
        "op_types": {**old["op_types"], **new["op_types"]},
        "tests": {**old["tests"], **new["tests"]},
        "everything": new["everything"] or old["everything"],
    }


def _reached(names: list[str], tree: Tree) -> dict[str, Any]:
    """What changed files of a tree reach."""
    stack = stack_of(tree)
    if not names:
        return {"stack": stack, "op_types": {}, "tests": {}, "everything": None}
    graph = Graph.of(tree)
    reached = graph.reach(names)
    tests = {
        path: [str(step) for step in reached.chains.get(path, ())]
        for path in graph.tests
        if reached.everything or path in reached.chains
    }
    # A row stands on all that the package of its environment holds.
    parts = [name for name in names if stack is not None and of_package(stack, name)]
    why = [f"{name}: lies in the package of {stack}" for name in parts[:1]]
    found = {op_type: {"parts": parts, "why": why} for op_type in op_types(stack)} if stack and parts else {}
    return {"stack": stack, "op_types": found, "tests": tests, "everything": reached.everything}


def _definitions(dataset: Path | None, op_types: Mapping[str, Any]) -> list[str]:
    if dataset is None:
        return []
    folder = dataset.expanduser() / "definitions"
    if not folder.is_dir():
        raise TraceproofError(f"--dataset {dataset} holds no definitions")
    return sorted(path.stem for op_type in op_types for path in (folder / op_type).glob("*.json"))


def _show(answer: Mapping[str, Any]) -> None:
    out = sys.stdout
    out.write(f"{len(answer['changed'])} changed files\n")
    if answer["stack"]:
        out.write(f"op_types of {answer['stack']}: {', '.join(answer['op_types']) or 'none'}\n")
    for op_type, found in answer["op_types"].items():
        more = len(found["parts"]) - PARTS_SHOWN
        out.write(
            f"  {op_type}: {', '.join(found['parts'][:PARTS_SHOWN])}"
            + (f" and {more} more\n" if more > 0 else "\n")
        )
        out.writelines(f"      {step}\n" for step in found["why"])
    if answer["definitions"]:
        out.write(f"definitions: {', '.join(answer['definitions'])}\n")
    out.write(f"{len(answer['tests'])} test files")
    out.write(f": all, since {answer['everything']}\n" if answer["everything"] else "\n")
    for path, chain in list(answer["tests"].items())[:SHOWN]:
        out.write(f"  {path}\n" + "".join(f"      {step}\n" for step in chain))
    if len(answer["tests"]) > SHOWN:
        out.write(f"  ... and {len(answer['tests']) - SHOWN} more; --json has all\n")

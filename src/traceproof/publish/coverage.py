"""Model coverage: which definitions of each model are verified, as rows of a bundle and as a document.

The document is a second pull request, to the GitHub repository that holds it: a branch in a local clone, whose
working tree, index and other branches stay as they are. The pull request's text and the command that pushes the
branch are told; nothing is pushed.
"""

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from traceproof.checkouts.gitrun import Git
from traceproof.dataset.definition import Definition
from traceproof.errors import TraceproofError
from traceproof.files import write_text
from traceproof.publish.ledger import REFERENCE, Ledger
from traceproof.text import markdown

BEGIN = "{/* traceproof: begin */}"  # a comment in MDX; what stands between the two is written anew
END = "{/* traceproof: end */}"
HEADING = "## Verified kernel definitions"
BRANCH = "traceproof/model-coverage"
TITLE = "docs: bring the coverage of models up to date"
REMOTE = "origin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One definition of one model."""

    model: str
    definition: str
    op_type: str
    # tp, ep: the parallelism that its tags name; None: they name none
    tp: int | None
    ep: int | None
    verified: bool  # as the ledger has it
    by: tuple[str, ...]  # the ground truths that its reference agrees with; empty unless verified
    reason: str  # why it is not verified; empty if it is
    device: str  # what the reference ran on

    def as_json(self) -> dict[str, Any]:
        """The row as a JSON object."""
        return asdict(self) | {"by": list(self.by)}


def coverage(definitions: Iterable[Definition], ledger: Ledger) -> tuple[Row, ...]:
    """A row for each model tag of each definition, by model, op_type and name."""
    rows = []
    for definition in definitions:
        standing = ledger.standing(definition)
        record = ledger.records.get(definition.name, {}).get(REFERENCE)
        rows += [
            Row(
                model=model,
                definition=definition.name,
                op_type=definition.op_type,
                tp=_number(definition.tags, "tp"),
                ep=_number(definition.tags, "ep"),
                verified=standing.verified,
                by=standing.truths if standing.verified else (),
                reason=standing.reason,
                device=(record.device or "") if record is not None else "",
            )
            for model in tag_values(definition.tags, "model")
        ]
    return tuple(sorted(rows, key=lambda row: (row.model, row.op_type, row.definition)))


def tag_values(tags: Iterable[str], kind: str) -> list[str]:
    """What tags of one kind say, e.g. `model`."""
    return [tag.partition(":")[2] for tag in tags if tag.startswith(f"{kind}:")]


def _number(tags: Iterable[str], kind: str) -> int | None:
    values = tag_values(tags, kind)
    return int(values[0]) if len(values) == 1 and re.fullmatch("[0-9]{1,9}", values[0]) else None


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown: one line per row."""
    lines = ["| model | definition | op_type | tp | ep | status |", "|---|---|---|---|---|---|"]
    for row in rows:
        numbers = " | ".join("" if value is None else str(value) for value in (row.tp, row.ep))
        lines.append(
            f"| {markdown(row.model)} | `{row.definition}` | {row.op_type} | {numbers} | {_status(row)} |"
        )
    return lines


def _status(row: Row) -> str:
    if row.verified:
        return f"verified by {', '.join(row.by)}"
    return f"unverified: {markdown(row.reason)}"


def totals(rows: Sequence[Row]) -> list[str]:
    """Markdown: one line per model."""
    lines = ["| model | definitions | verified |", "|---|---|---|"]
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        lines.append(f"| {markdown(model)} | {len(own)} | {sum(row.verified for row in own)} |")
    return lines


def section(rows: Sequence[Row], origin: str) -> str:
    """The document's part that is ours, between its two marks; `origin` is a line on dataset and checks."""
    parts = [BEGIN, HEADING, "", markdown(origin), "", *totals(rows)]
    for model in dict.fromkeys(row.model for row in rows):
        parts += ["", f"### {markdown(model)}", "", *table([row for row in rows if row.model == model])]
    return "\n".join([*parts, END])


def inserted(text: str, part: str) -> str:
    """A document with our part in it: in the place of the former one, else at the end; the rest stays as it is."""
    begin, end = text.find(BEGIN), text.find(END)
    if 0 <= begin < end:
        return text[:begin] + part + text[end + len(END) :]
    gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    return f"{text}{gap}{part}\n"


def tree_with(git: Git, base: str, files: Mapping[str, bytes]) -> str:
    """Write the tree of a commit with these files on top; its digest."""
    with tempfile.TemporaryDirectory() as scratch:
        index = Path(scratch) / "index"
        git.local("read-tree", base, index=index)
        listed = ""
        for path, data in sorted(files.items()):
            blob = git.local("hash-object", "-w", "--stdin", data=data).strip()
            listed += f"100644 {blob}\t{path}\n"
        git.local("update-index", "--index-info", data=listed.encode(), index=index)
        return git.local("write-tree", "--missing-ok", index=index).strip()


@dataclass(frozen=True, slots=True)
class CoverageBranch:
    """A branch that is ready to push."""

    branch: str  # its name
    base: str  # the branch and commit that it goes on top of
    committed: bool  # whether a commit was made; False: the branch holds exactly this already
    text: Path  # file with the pull request's title and text
    command: str  # what pushes it


def coverage_branch(clone: Path, file: str, rows: Sequence[Row], *, origin: str, out: Path) -> CoverageBranch:
    """Commit the document, made where it is absent, to the branch of a clone, and write the pull request's text.

    Raises TraceproofError: it is no clone, the path leaves it, or git knows no author.
    """
    if Path(file).is_absolute() or ".." in Path(file).parts:
        raise TraceproofError(f"{file!r} is no path inside {clone}")
    git = Git(clone)
    # On top of the remote's default branch, else of the clone's current one.
    name = git.local("for-each-ref", "--format=%(symref:short)", f"refs/remotes/{REMOTE}/HEAD").strip() or "HEAD"
    base = git.commit(name)
    present = git.local("ls-tree", "-z", "--name-only", base, "--", file).strip("\0") == file
    text = git.local("cat-file", "blob", f"{base}:{file}") if present else ""
    tree = tree_with(git, base, {file: inserted(text, section(rows, origin)).encode()})
    body = "\n".join(
        [
            f"`{file}` says which kernel definitions of each model are verified. A definition counts as verified",
            "while its reference and at least one ground truth pass every comparison with an independent float64",
            f"oracle. {origin}",
            "",
            *totals(rows),
            "",
            "Only the part between the two `traceproof` marks is written; the rest of the document stays as it",
            "is.",
            "",
        ]
    )
    committed = _commit(git, tree, base, f"{TITLE}\n\n{body}")
    target = out / "coverage" / "pull-request.md"
    write_text(target, f"# {TITLE}\n\n{body}")
    command = f"git -C {clone} push {REMOTE} {BRANCH}"
    return CoverageBranch(BRANCH, f"{name} {base}", committed, target, command)


def _commit(git: Git, tree: str, base: str, message: str) -> bool:
    """One commit on top of the base, put on the branch unless it is there; what it had before is replaced."""
    tip = git.local("for-each-ref", "--format=%(objectname)", f"refs/heads/{BRANCH}").strip()
    if tree == git.local("rev-parse", f"{base}^{{tree}}").strip():
        return False
    if tip:
        same = git.local("rev-parse", f"{tip}^{{tree}}").strip() == tree
        if same and git.local("rev-parse", f"{tip}^").strip() == base:
            return False
        if git.local("branch", "--show-current").strip() == BRANCH:
            todo = f"Change to another branch there: {BRANCH} is written anew."
            raise TraceproofError(f"{git.folder} has {BRANCH} checked out", todo=todo)
    commit = git.local("commit-tree", tree, "-p", base, data=message.encode()).strip()
    git.local("update-ref", f"refs/heads/{BRANCH}", commit, tip or "0" * len(commit))
    return True

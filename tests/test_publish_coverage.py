"""Generated tests in a bundle, and model coverage: rows, the document, and the branch that holds it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from publish_support import CASES, bundles, dataset, finished, row

from traceproof.dataset.tree import read_tree
from traceproof.errors import TraceproofError
from traceproof.publish.bundle import Folder
from traceproof.publish.change import resolve
from traceproof.publish.check import problems
from traceproof.publish.coverage import BEGIN, BRANCH, END, coverage_branch, inserted, section
from traceproof.publish.prepare import Prepared, Source, dry_run
from traceproof.testgen.generate import headed

DOCUMENT = "docs/model_coverage.mdx"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """A run in which alpha and beta are verified, gamma is not, and beta has a test file of its own."""
    folder = tmp_path_factory.mktemp("publish")
    root = dataset(folder / "dataset", "alpha", "beta", "gamma")
    (root / "tests" / "references").mkdir(parents=True)
    (root / "tests" / "references" / "test_beta.py").write_text("assert True\n")
    digests = {name: entry.digest for name, entry in read_tree(root).definitions.items()}
    implementations = ("reference", "torch")
    rows = [
        row(name, digests[name], case, implementation)
        for name in ("alpha", "beta")
        for case in CASES
        for implementation in implementations
    ]
    return replace(finished(folder / "run", root, rows), tests=True)


@pytest.fixture(scope="module")
def prepared(source: Source) -> dict[str, Prepared]:
    """The bundles of alpha and beta."""
    made = bundles(source, "alpha", "beta")
    return {next(iter(item.bundle.definitions)): item for item in made}


def test_a_definition_without_tests_gets_them_with_all_that_they_need(
    prepared: dict[str, Prepared], source: Source
) -> None:
    pieces = {piece.path: piece.data for piece in prepared["alpha"].bundle.pieces}
    tests = [path for path in pieces if path.startswith("tests/")]
    assert tests == ["tests/references/conftest.py", "tests/references/test_alpha.py"]
    assert b'DEFINITION = "alpha"' in pieces["tests/references/test_alpha.py"]
    assert len(pieces) <= 10
    base = Folder(source.dataset)
    assert (
        problems(prepared["alpha"].bundle, resolve(prepared["alpha"].bundle, base, allow_changes=False), base)
        == []
    )


def test_a_definition_that_has_a_test_file_keeps_it(prepared: dict[str, Prepared]) -> None:
    assert not [piece.path for piece in prepared["beta"].bundle.pieces if piece.path.startswith("tests/")]
    assert any("no generated test, the dataset has" in note for note in prepared["beta"].bundle.notes)


@pytest.mark.parametrize(
    ("old", "changed", "kept"),
    [
        (headed("# of an earlier version\n"), True, False),
        (headed("# of an earlier version\n") + "# edited\n", False, True),
        ("assert True\n", False, True),
    ],
    ids=["ours", "edited", "another's"],
)
def test_a_test_that_is_there_is_replaced_where_nobody_wrote_in_it(
    prepared: dict[str, Prepared], tmp_path: Path, old: str, *, changed: bool, kept: bool
) -> None:
    path = tmp_path / "tests" / "references" / "conftest.py"
    path.parent.mkdir(parents=True)
    path.write_text(old)
    change = resolve(prepared["alpha"].bundle, Folder(tmp_path), allow_changes=False)
    name = "tests/references/conftest.py"
    assert (name in change.files, name in change.kept) == (changed, kept)
    assert change.problems == []


def test_the_description_and_the_dry_run_have_the_model_coverage(
    prepared: dict[str, Prepared], tmp_path: Path
) -> None:
    dry_run(prepared["alpha"], tmp_path, allow_changes=False)
    folder = tmp_path / "definition-alpha"
    assert "| tiny | `alpha` | rmsnorm |  |  | verified by torch |" in (folder / "description.md").read_text()
    (found,) = json.loads((folder / "coverage.json").read_text())
    assert (found["model"], found["verified"], found["by"]) == ("tiny", True, ["torch"])


def test_the_document_names_every_definition_and_keeps_what_is_around(prepared: dict[str, Prepared]) -> None:
    part = section(prepared["alpha"].coverage, "Dataset: <made>")
    assert "| tiny | 3 | 2 |" in part
    assert "| tiny | `gamma` | rmsnorm |  |  | unverified: it was not run |" in part
    assert "&#60;made>" in part
    text = inserted("# Coverage\r\n\nours\n", part)
    assert text.startswith("# Coverage\r\n\nours\n\n" + BEGIN)
    again = inserted(text + "after", part.replace("tiny", "huge"))
    assert again == text.replace("tiny", "huge") + "after"
    assert again.count(BEGIN) == again.count(END) == 1


def git(clone: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(clone), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of a repository with the document in it."""
    remote = tmp_path / "remote"
    (remote / "docs").mkdir(parents=True)
    (remote / DOCUMENT).write_text("# Coverage\n")
    git(tmp_path, "init", "--quiet", "--initial-branch=trunk", str(remote))
    person = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    git(remote, "add", ".")
    git(remote, *person, "commit", "--quiet", "--message=Begin")
    folder = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(remote), str(folder))
    git(folder, "config", "user.name", "b")
    git(folder, "config", "user.email", "b@example.org")
    return folder


def test_the_branch_holds_one_commit_and_nothing_else_of_the_clone_changes(
    prepared: dict[str, Prepared], clone: Path, tmp_path: Path
) -> None:
    rows = prepared["alpha"].coverage
    (clone / DOCUMENT).write_text("edited, not committed\n")
    before = git(clone, "status", "--porcelain", "--branch"), git(clone, "rev-parse", "HEAD")
    made = coverage_branch(clone, DOCUMENT, rows, origin="Dataset: made.", out=tmp_path)
    assert made.committed
    assert made.base.startswith("origin/trunk ")
    assert git(clone, "diff", "--name-only", f"origin/trunk..{BRANCH}") == DOCUMENT
    assert git(clone, "show", f"{BRANCH}:{DOCUMENT}").startswith(f"# Coverage\n\n{BEGIN}")
    assert (git(clone, "status", "--porcelain", "--branch"), git(clone, "rev-parse", "HEAD")) == before
    assert "| tiny | 3 | 2 |" in made.text.read_text()
    assert not coverage_branch(clone, DOCUMENT, rows, origin="Dataset: made.", out=tmp_path).committed
    assert coverage_branch(clone, DOCUMENT, rows[:1], origin="Dataset: made.", out=tmp_path).committed
    assert git(clone, "rev-list", "--count", f"origin/trunk..{BRANCH}") == "1"
    git(clone, *made.command.split()[3:])
    assert git(tmp_path / "remote", "rev-parse", BRANCH) == git(clone, "rev-parse", BRANCH)


def test_a_document_that_is_absent_is_made(prepared: dict[str, Prepared], clone: Path, tmp_path: Path) -> None:
    coverage_branch(clone, "new/page.mdx", prepared["alpha"].coverage, origin="", out=tmp_path)
    assert git(clone, "show", f"{BRANCH}:new/page.mdx").startswith(BEGIN)


@pytest.mark.parametrize("file", ["/etc/passwd", "../outside.mdx"])
def test_a_document_outside_the_clone_is_refused(clone: Path, tmp_path: Path, file: str) -> None:
    with pytest.raises(TraceproofError, match="no path inside"):
        coverage_branch(clone, file, (), origin="", out=tmp_path)


def test_what_is_no_clone_and_a_branch_in_use_are_told(
    prepared: dict[str, Prepared], clone: Path, tmp_path: Path
) -> None:
    with pytest.raises(TraceproofError, match="there is no repository"):
        coverage_branch(tmp_path, DOCUMENT, (), origin="", out=tmp_path)
    rows = prepared["alpha"].coverage
    coverage_branch(clone, DOCUMENT, rows, origin="", out=tmp_path)
    git(clone, "checkout", "--quiet", BRANCH)
    with pytest.raises(TraceproofError, match="checked out"):
        coverage_branch(clone, DOCUMENT, rows[:1], origin="", out=tmp_path)


def test_a_definition_that_the_published_dataset_lacks_is_among_the_files(
    prepared: dict[str, Prepared], tmp_path: Path
) -> None:
    published = dataset(tmp_path / "published", "beta")
    item = prepared["alpha"]
    listed = dry_run(
        replace(item, source=replace(item.source, base=published)), tmp_path / "dry", allow_changes=False
    )
    assert "definitions/rmsnorm/alpha.json" in {file["path"] for file in listed["files"]}
    assert "definitions/rmsnorm/alpha.json" in dry_run(item, tmp_path / "dry", allow_changes=False)["unchanged"]

"""The rules as text: what holds for every one of them."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
from repository import Repository, own_dataset

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "Snakefile", *sorted((ROOT / "rules").glob("*.smk"))]
COMMAND = re.compile(r"(?m)^ +shell:\n((?: +\".*\"\n)+)")
PLACEHOLDER = re.compile(r"(?<!\{)\{([^{}]+)\}")


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_every_placeholder_of_a_command_is_quoted(file: Path) -> None:
    text = file.read_text()
    commands = COMMAND.findall(text)
    assert len(commands) == text.count("    shell:\n")
    bare = [name for command in commands for name in PLACEHOLDER.findall(command) if not name.endswith(":q")]
    assert bare == []


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_no_rule_asks_for_cores_before_it_runs(file: Path) -> None:
    """A batch system has none to tell: the Snakefile would end with an error there."""
    assert re.findall(r"(?m)^ +threads: .*workflow\.cores", file.read_text()) == []


def test_paths_with_spaces_and_other_letters_are_paths_like_any(tmp_path: Path) -> None:
    dataset = own_dataset(tmp_path / "Daten satz ü", "rmsnorm/rmsnorm_h96")
    root = tmp_path / "Prüf ordner"
    root.mkdir()
    (root / "bekannte Fehler.yaml").write_text("findings: []\n")
    options = {"results": "my results", "known": "bekannte Fehler.yaml", "truths": ["torch"]}
    repository = Repository.copy(root, dataset={"path": str(dataset)}, **options)
    ran = repository.verify("--force", "--", "--quiet")
    assert ran.code == 0, ran.out
    assert repository.summary("my results")["definitions"] == {"rmsnorm_h96": "pass"}
    ran = repository.run("snakemake", "--cores", "1", "publish", "site")
    assert ran.code == 0, ran.out
    assert (root / "my results" / "tests" / "rmsnorm-torch.xml").is_file()
    assert (root / "my results" / "publish" / "dry-run.json").is_file()
    assert (root / "my results" / "site" / "definitions" / "rmsnorm_h96.html").is_file()
    ran = repository.run("snakemake", "site", "--report", "report.zip")
    assert ran.code == 0, ran.out
    with zipfile.ZipFile(root / "report.zip") as report:
        kinds = {Path(name).name for name in report.namelist()}
    assert {"report.html", "verdicts.html", "margins.html", "index.html"} <= kinds

"""The dataset card: the hub's viewer shows what is published, and nobody else's card is touched."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from publish_support import CASES, bundles, dataset, finished, row
from ruamel.yaml import YAML

from traceproof.dataset.tree import read_tree
from traceproof.errors import TraceproofError
from traceproof.publish.bundle import TABLE, Folder, Piece, card
from traceproof.publish.change import resolve
from traceproof.publish.check import problems
from traceproof.publish.prepare import Prepared, Source, dry_run, prepare_card, write_ledger

README = "README.md"


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """A run in which alpha is verified and beta is not, over a dataset that has workloads."""
    root = dataset(tmp_path / "dataset", "alpha", "beta")
    (root / "workloads" / "rmsnorm").mkdir(parents=True)
    (root / "workloads" / "rmsnorm" / "alpha.jsonl").write_text("{}\n")
    digests = {name: entry.digest for name, entry in read_tree(root).definitions.items()}
    rows = [row("alpha", digests["alpha"], case, actor) for case in CASES for actor in ("reference", "torch")]
    return finished(tmp_path / "run", root, rows)


@pytest.fixture
def prepared(source: Source) -> Prepared:
    return prepare_card(source, write_ledger(source, read_tree(source.dataset)))


def test_the_viewer_is_told_of_what_the_dataset_holds(prepared: Prepared, tmp_path: Path) -> None:
    listed = dry_run(prepared, tmp_path / "out", allow_changes=False)
    assert [file["path"] for file in listed["files"]] == [README, TABLE]
    files = tmp_path / "out" / "card" / "files"
    told = YAML(typ="safe").load((files / README).read_text().split("---\n")[1])
    assert [config["config_name"] for config in told["configs"]] == ["definitions", "workloads"]
    rows = [json.loads(line) for line in (files / TABLE).read_text().splitlines()]
    assert [(found["name"], found["verified_by"]) for found in rows] == [("alpha", ["torch"])]
    assert "status:verified" in rows[0]["tags"]
    columns = {
        entry["config_name"]: [item["name"] for item in entry["features"]] for entry in told["dataset_info"]
    }
    assert columns["definitions"] == list(rows[0])


def test_another_card_stays_whatever_is_allowed(prepared: Prepared, source: Source, tmp_path: Path) -> None:
    (source.dataset / README).write_text("# Theirs\n")
    with pytest.raises(TraceproofError, match="cannot be published") as raised:
        dry_run(prepared, tmp_path / "out", allow_changes=True)
    assert f"{README} exists and would change" in raised.value.problems


def test_a_card_of_ours_follows_the_dataset(prepared: Prepared, source: Source) -> None:
    (source.dataset / README).write_bytes(card(["definitions"]))
    change = resolve(prepared.bundle, Folder(source.dataset), allow_changes=False)
    assert change.problems == []
    assert change.files[README] == card(["definitions", "workloads"])
    (source.dataset / README).write_bytes(change.files[README])
    assert resolve(prepared.bundle, Folder(source.dataset), allow_changes=False).same == [README]


@pytest.mark.parametrize(
    ("path", "data", "problem"),
    [
        (README, card(["definitions", "traces"]), "which the dataset lacks"),
        (TABLE, b'{"name": "gone", "op_type": "rmsnorm"}\n', "has a row for gone"),
        ("viewer/other.jsonl", b"{}\n", "outside the dataset's layout"),
    ],
)
def test_the_checker_refuses(prepared: Prepared, source: Source, path: str, data: bytes, problem: str) -> None:
    pieces = {piece.path: piece for piece in prepared.bundle.pieces} | {path: Piece(path, data)}
    bundle = replace(prepared.bundle, pieces=tuple(pieces.values()))
    base = Folder(source.dataset)
    told = problems(bundle, resolve(bundle, base, allow_changes=False), base)
    assert [line for line in told if problem in line], told


def test_a_bundle_of_definitions_brings_no_card(source: Source) -> None:
    made = bundles(source, "alpha")[0]
    assert README not in {piece.path for piece in made.bundle.pieces}

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from traceproof.config import Config, merged, read_config
from traceproof.errors import TraceproofError

ROOT = Path(__file__).resolve().parent.parent
DATASET = Path(__file__).resolve().parent / "dataset"


@pytest.fixture(scope="module")
def shipped() -> dict[str, Any]:
    value: dict[str, Any] = YAML(typ="safe").load((ROOT / "config.yaml").read_text())
    return value


def problems(raw: dict[str, Any], root: Path = ROOT) -> list[str]:
    with pytest.raises(TraceproofError) as caught:
        read_config(raw, root=root)
    assert str(caught.value).startswith("config.yaml cannot be used:\n  - ")
    return list(caught.value.problems)


def test_the_shipped_file_is_valid_and_names_every_key(shipped: dict[str, Any]) -> None:
    config = read_config(shipped, root=ROOT)
    assert config.test_sizes == ("small", "medium")
    assert set(shipped) == set(Config.model_fields)
    assert shipped["dataset"] == "locked"
    for key in ("selection", "limits", "stacks"):
        model = Config.model_fields[key].annotation
        assert set(getattr(model, "model_fields", ())) == set(shipped[key])


def test_every_key_of_the_shipped_file_has_a_comment() -> None:
    lines = (ROOT / "config.yaml").read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if line and not line.startswith((" ", "#")):
            assert above.startswith("#"), f"no comment above {line!r}"


def test_all_problems_are_reported_at_once(shipped: dict[str, Any]) -> None:
    raw = merged(
        shipped,
        {
            "foo": 1,
            "seed": "three",
            "test_sizes": ["small", "huge"],
            "limits": {"wall_s": -1},
            "selection": {"optype": [], "op_type": ["gmm"]},
            "dataset": {"pypi": None, "path": str(DATASET)},
        },
    )
    found = "\n".join(problems(raw))
    for part in (
        "foo: unknown key",
        "seed: 'three': input should be a valid integer",
        "test_sizes.1: 'huge'",
        "limits.wall_s: -1",
        "selection.optype: unknown key; did you mean 'op_type'?",
    ):
        assert part in found


def test_what_fits_the_schema_is_checked_on_disk_whatever_else_is_wrong(shipped: dict[str, Any]) -> None:
    raw = merged(shipped, {"seed": -1, "known": "nowhere.yaml", "dataset": {"pypi": None, "path": "/nowhere"}})
    assert [problem.partition(":")[0] for problem in problems(raw)] == ["seed", "known", "dataset.path"]


def test_an_op_type_of_ones_own_is_fine_where_the_dataset_has_it(shipped: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "definitions" / "my_op").mkdir(parents=True)
    (tmp_path / "definitions" / "my_op" / "one.json").write_text("{}")
    changes = {"dataset": {"pypi": None, "path": str(tmp_path)}, "selection": {"op_type": ["my_op"]}}
    assert read_config(merged(shipped, changes), root=ROOT).selection.op_types == ("my_op",)


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ({}, "give exactly one of 'pypi', 'git' and 'path', not none"),
        ({"path": "a", "git": {"url": "u", "commit": "0" * 40}}, "not 'git' and 'path'"),
        ({"git": {"url": "u", "commit": "main"}}, "dataset.git.commit: 'main' does not have the form"),
        ({"git": {"url": "--upload-pack=x", "commit": "0" * 40}}, "dataset.git.url: is not a URL"),
        ({"pypi": {"package": "p", "version": "1"}}, "dataset.pypi.sha256: missing"),
        ({"path": "."}, "holds no definitions"),
    ],
)
def test_a_dataset_source_that_cannot_be_used(
    shipped: dict[str, Any], dataset: dict[str, Any], said: str, tmp_path: Path
) -> None:
    raw = {**copy.deepcopy(shipped), "dataset": dataset, "known": None}
    assert any(said in problem for problem in problems(raw, tmp_path))


def test_a_folder_alone_is_short_for_path_and_all_overrides_both_lists(shipped: dict[str, Any]) -> None:
    assert read_config({**shipped, "dataset": str(DATASET)}, root=ROOT).dataset.path == DATASET
    changes = {"selection": {"op_type": ["rmsnorm"], "definition_name": ["x"], "all": True}}
    selection = read_config(merged(shipped, changes), root=ROOT).selection
    assert (selection.op_types, selection.definitions) == ((), ())


def test_a_locked_dataset_is_what_sources_lock_pins(shipped: dict[str, Any], tmp_path: Path) -> None:
    raw = {**shipped, "known": None}
    (problem,) = problems(raw, tmp_path)
    assert problem.startswith(f"dataset: locked: {tmp_path / 'sources.lock'} has no flashinfer_trace")
    assert problem.endswith("pin it: traceproof clone-repos flashinfer_trace")
    pin: dict[str, Any] = {"url": "https://example.org/trace", "commit": "1" * 40, "ref": "refs/heads/main"}
    lock = tmp_path / "sources.lock"
    lock.write_text(json.dumps({"sources": {"flashinfer_trace": pin}}))
    git = read_config(raw, root=tmp_path).dataset.git
    assert git is not None
    assert (git.url, git.commit, git.folder) == (pin["url"], pin["commit"], ".")
    pin = {"package": "p", "version": "1", "sha256": "2" * 64, "folder": "trace"}
    lock.write_text(json.dumps({"sources": {"flashinfer_trace": pin}}))
    pypi = read_config(raw, root=tmp_path).dataset.pypi
    assert pypi is not None
    assert pypi.model_dump() == pin

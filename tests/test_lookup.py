"""Definitions by what a user calls them: names, op_types, files, folders; and what is said of unusable ones."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from repository import own_dataset

from traceproof.dataset.tree import Selected, find, read_tree, wanted
from traceproof.errors import TraceproofError

NORM, GEMM = "rmsnorm_h96", "gemm_n96_k160"


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return own_dataset(tmp_path / "mine", f"rmsnorm/{NORM}", f"gemm/{GEMM}")


def select(dataset: Path, *words: str, given: Path | None = None) -> Selected:
    return wanted([word.replace("{}", str(dataset)) for word in words], lambda: dataset, given)


def break_schema(dataset: Path) -> Path:
    """What the tutorial's third step does: a shape names an axis that there is none of."""
    file = dataset / "definitions" / "rmsnorm" / f"{NORM}.json"
    file.write_text(file.read_text().replace("hidden_size", "hidden_size + 1"))
    return file


@pytest.mark.parametrize(
    ("words", "op_types", "definitions"),
    [
        (["rmsnorm"], ["rmsnorm"], []),
        ([NORM], [], [NORM]),
        (["rmsnorm", "gemm"], ["rmsnorm", "gemm"], []),
        ([NORM, "gemm"], [], [NORM, GEMM]),
        ([f"{{}}/definitions/rmsnorm/{NORM}.json"], [], [NORM]),
        (["{}/definitions/rmsnorm"], ["rmsnorm"], []),
        (["{}/definitions"], [], []),
        (["{}"], [], []),
        (["{}", NORM], [], []),
    ],
)
def test_words_select_op_types_definitions_files_and_folders(
    dataset: Path, words: list[str], op_types: list[str], definitions: list[str]
) -> None:
    root = dataset if any("{}" in word for word in words) else None
    assert select(dataset, *words) == Selected(root=root, op_types=tuple(op_types), definitions=tuple(definitions))


def test_a_file_of_its_own_is_a_dataset_of_one(dataset: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone" / "new.json"
    alone.parent.mkdir()
    shutil.copy(dataset / "definitions" / "gemm" / f"{GEMM}.json", alone)
    assert select(dataset, str(alone)) == Selected(root=alone.parent, definitions=(GEMM,))
    alone.write_text('{"name": "gemm_n1')
    with pytest.raises(TraceproofError, match=r"new\.json: not JSON"):
        select(dataset, str(alone))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rmsnrom"], "'rmsnrom' is not in the dataset; close to it: rmsnorm_h96"),
        (["gem"], "op_types there: gemm, rmsnorm"),
        (["{}/nowhere.json"], "there is no file or folder"),
        (["{}/nowhere"], "there is no file or folder"),
    ],
)
def test_a_word_that_is_nothing_says_what_is_close(dataset: Path, words: list[str], told: str) -> None:
    with pytest.raises(TraceproofError, match=re.escape(told)):
        select(dataset, *words)


def test_paths_of_two_datasets_are_refused(dataset: Path, tmp_path: Path) -> None:
    other = own_dataset(tmp_path / "other", f"gemm/{GEMM}")
    with pytest.raises(TraceproofError, match="several datasets"):
        select(dataset, "{}", str(other))
    with pytest.raises(TraceproofError, match="several datasets"):
        select(dataset, "{}", given=other)


def test_a_file_whose_name_another_file_has_taken_is_not_verified_in_its_place(dataset: Path) -> None:
    copy = dataset / "definitions" / "rmsnorm" / "z.json"
    shutil.copy(dataset / "definitions" / "rmsnorm" / f"{NORM}.json", copy)
    with pytest.raises(TraceproofError, match=f"so does .*{NORM}.json, which is the one that counts"):
        select(dataset, str(copy))


def test_a_file_beside_the_definitions_is_told_where_it_belongs(dataset: Path) -> None:
    file = dataset / "mine.json"
    text = (dataset / "definitions" / "gemm" / f"{GEMM}.json").read_text()
    file.write_text(text.replace(GEMM, "gemm_n1_k1"))
    with pytest.raises(TraceproofError, match="is not among the definitions of the dataset"):
        select(dataset, str(file))


@pytest.mark.parametrize("word", [NORM, "{file}", "rmsnorm gemm_n96_k160"])
@pytest.mark.parametrize("how", ["schema", "truncated"])
def test_a_file_that_can_not_be_used_says_what_is_wrong_with_it(dataset: Path, word: str, how: str) -> None:
    file = break_schema(dataset)
    told = "hidden_size + 1"
    if how == "truncated":
        file.write_text(file.read_text()[:300])
        told = "not JSON: "
    with pytest.raises(TraceproofError) as caught:
        select(dataset, *word.replace("{file}", str(file)).split())
    assert told in str(caught.value)
    assert "rmsnorm_h96.json" in str(caught.value)
    assert "close to it" not in str(caught.value)


def test_a_broken_file_is_found_by_the_name_that_it_says(dataset: Path) -> None:
    file = break_schema(dataset)
    file.rename(file.with_name("other.json"))
    with pytest.raises(TraceproofError, match=r"definitions/rmsnorm/other.json: .*hidden_size"):
        find(read_tree(dataset), NORM)


def test_a_name_that_is_an_op_type_too_has_to_be_told_apart(dataset: Path) -> None:
    file = dataset / "definitions" / "gemm" / f"{GEMM}.json"
    value = json.loads(file.read_text())
    (dataset / "definitions" / "gemm" / "rmsnorm.json").write_text(json.dumps(value | {"name": "rmsnorm"}))
    with pytest.raises(TraceproofError, match="--op-type rmsnorm or --definition-name rmsnorm"):
        select(dataset, "rmsnorm")

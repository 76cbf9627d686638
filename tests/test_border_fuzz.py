"""What a worker answers or the store holds ends as a typed value or as one error, and damage is never believed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from traceproof.errors import TraceproofError
from traceproof.pipeline.run_record import RunRecord
from traceproof.pipeline.stages.manifest import Manifest
from traceproof.store import Store
from traceproof.untrusted.border import (
    Answer,
    BorderError,
    answer_of,
    plain_text,
    read_json,
    read_regular,
    remove_tree,
)

RIGHT: dict[str, Any] = {
    "outputs": [{"index": 0, "name": None, "dtype": "bfloat16", "shape": [2, 32]}],
    "aliased": [],
    "subclassed": [],
}
ODD: list[Any] = [
    None, True, -1, 0, 1.5, float("nan"), float("inf"), 10**400, "", "x" * 300, "\ud800", "__metadata__", [], {},
    [[]], [{}], {"": None}, [None] * 70, "../../x", "bfloat16\n",
]  # fmt: skip
KEY = "cd" * 16


def mutations(value: Any) -> list[Any]:  # noqa: ANN401 - any JSON value
    """The value with each part of it replaced by each odd one, left out, or joined by one more."""
    found = list(ODD)
    if isinstance(value, dict):
        for key, part in value.items():
            found += [value | {key: other} for other in mutations(part)]
            found.append({name: value[name] for name in value if name != key})
        found += [value | {name: 0} for name in ("key", "status", "skip", "")]
    if isinstance(value, list):
        for index, part in enumerate(value):
            found += [[*value[:index], other, *value[index + 1 :]] for other in mutations(part)]
        found += [value * 2, value * 100]
    return found


def test_an_answer_is_in_its_form_or_an_error_of_its_case() -> None:
    tried = taken = 0
    for value in mutations(RIGHT):
        tried += 1
        try:
            answer = answer_of(value)
        except BorderError as error:
            assert len(str(error)) < 500  # noqa: PT017 - the other branch is the subject as well
            str(error).encode()
            continue
        taken += 1
        assert isinstance(answer, Answer)
        assert all(size >= 0 for output in answer.outputs for size in output.shape)
    assert tried > 200
    assert taken < tried / 4


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "x" * 100_000, "\x00", ""])
def test_text_is_what_a_file_can_hold(text: str) -> None:
    kept = plain_text(text)
    kept.encode("utf-8")
    assert len(kept) <= 8 * 8000


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store(tmp_path / "store", "outputs")
    save_file({"output": torch.arange(64, dtype=torch.float32)}, tmp_path / "made")
    found.finish(KEY, {"key": KEY, "status": "ok", "inputs": "0" * 32}, tmp_path / "made")
    return found


@pytest.mark.parametrize("seed", range(100))
def test_damage_to_a_finished_object_is_never_believed(store: Store, seed: int) -> None:
    """A byte flipped, a file cut, grown, emptied or taken away, in the record or in the tensors."""
    draw = random.Random(seed)  # noqa: S311 - which damage
    before = store.record(KEY)
    assert before is not None
    path = draw.choice([store.record_path(KEY), store.tensors_path(KEY)])
    data = bytearray(path.read_bytes())
    damage = draw.choice(["flip", "cut", "grow", "empty", "gone", "shuffle"])
    if damage == "flip":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif damage == "cut":
        del data[draw.randrange(len(data)) :]
    elif damage == "grow":
        data += bytes([draw.randrange(1, 256)])
    elif damage == "empty":
        data.clear()
    elif damage == "shuffle":
        place = draw.randrange(len(data) - 1)
        data[place], data[place + 1] = data[place + 1] ^ 1, data[place]
    path.write_bytes(data)
    if damage == "gone":
        path.unlink()
    after = store.record(KEY)
    if after is None:
        return
    assert after == before
    if store.whole(KEY, after):
        assert torch.equal(store.tensors(KEY, after)["output"], torch.arange(64, dtype=torch.float32))
        assert path == store.record_path(KEY)  # white space in it, say
    else:
        assert store.record(KEY) is None


@pytest.mark.parametrize("edit", ["skip", "cut", "list", "empty", "no seal"])
def test_a_manifest_that_was_edited_is_removed_and_said(tmp_path: Path, edit: str) -> None:
    path = tmp_path / "reference.json"
    cases = {"alpha": {"small-0": RunRecord(key=KEY, status="ok")}}
    Manifest(actor="reference", op_type="rmsnorm", code="0", environment={}, cases=cases).write(path)
    assert Manifest.read(path).cases == cases
    value = json.loads(path.read_text(encoding="utf-8"))
    skipped = {"alpha": {"small-0": {"key": KEY, "status": "skip", "reason": "no_cuda", "message": ""}}}
    texts = {
        "skip": json.dumps(value | {"cases": skipped}),
        "cut": path.read_text(encoding="utf-8")[:-20],
        "list": "[]",
        "empty": "",
        "no seal": json.dumps({name: value[name] for name in value if name != "seal"}),
    }
    path.write_text(texts[edit], encoding="utf-8")
    with pytest.raises(TraceproofError, match="damaged"):
        Manifest.read(path)
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\xff", "nul"])
def test_a_file_that_is_no_json_is_one_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(BorderError):
        read_json(path)


def test_a_file_has_the_size_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1234")
    assert read_regular(path, most=4) == b"1234"
    for asked in ({"most": 3}, {"most": 9, "exactly": 5}, {"most": 9, "exactly": 3}):
        with pytest.raises(BorderError, match="holds 4 bytes"):
            read_regular(path, **asked)
    with pytest.raises(BorderError):
        read_regular(Path("/dev/zero"), most=1 << 20)
    with pytest.raises(BorderError):
        read_regular(tmp_path / ("x" * 300), most=1)


def test_a_folder_goes_whatever_is_in_it_and_nothing_else(tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "kept").touch()
    folder = tmp_path / "scratch"
    (folder / "locked" / "inner").mkdir(parents=True)
    (folder / "link").symlink_to(beside)
    (folder / "locked" / "link").symlink_to(beside)
    (folder / "locked").chmod(0)
    remove_tree(folder)
    assert not folder.exists()
    folder.symlink_to(beside)
    remove_tree(folder)
    assert not folder.is_symlink()
    assert (beside / "kept").exists()

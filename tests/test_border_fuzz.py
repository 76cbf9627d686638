"""What a worker answers or leaves ends as a typed value or as one error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from traceproof.files import BorderError, read_regular, remove_tree
from traceproof.run.untrusted import CallAnswer, answer_of
from traceproof.text import plain_text

RIGHT: dict[str, Any] = {
    "outputs": [{"index": 0, "name": None, "dtype": "bfloat16", "shape": [2, 32]}],
    "aliased": [],
    "subclassed": [],
}
ODD: list[Any] = [
    None, True, -1, 0, 1.5, float("nan"), float("inf"), 10**400, "", "x" * 300, "\ud800", "__metadata__", [], {},
    [[]], [{}], {"": None}, [None] * 70, "../../x", "bfloat16\n",
]  # fmt: skip


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
        assert isinstance(answer, CallAnswer)
        assert all(size >= 0 for output in answer.outputs for size in output.shape)
    assert tried > 200
    assert taken < tried / 4


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "x" * 100_000, "\x00", ""])
def test_text_is_what_a_file_can_hold(text: str) -> None:
    kept = plain_text(text)
    kept.encode("utf-8")
    assert len(kept) <= 8 * 8000


def test_a_file_is_regular_and_no_larger_than_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1234")
    assert read_regular(path, most=4) == b"1234"
    with pytest.raises(BorderError, match="holds 4 bytes"):
        read_regular(path, most=3)
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "fifo")
    for odd in (Path("/dev/zero"), tmp_path, tmp_path / "link", tmp_path / "fifo", tmp_path / ("x" * 300)):
        with pytest.raises(BorderError):
            read_regular(odd, most=1 << 20)


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

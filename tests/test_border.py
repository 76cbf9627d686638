"""What a reference that got past the policy leaves or says: it costs exactly its case, and is never a pass.

The references here reach the code that calls them, which nothing in one process can prevent, and put something
else in the place of its answer, its files or its exceptions.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from definitions import rmsnorm, write
from pipeline import Rows, Run, verdicts
from test_hostile import NORM

from traceproof.files import BorderError, read_regular, remove_tree
from traceproof.run.plan import PlanSelection
from traceproof.run.untrusted import answer_of
from traceproof.sandbox import Limits, policy
from traceproof.text import plain_text

HEAD = """
import errno, fcntl, os, pathlib, socket, struct, json, signal, threading, time
import torch

CALLER = next(one for one in object.__subclasses__() if one.__name__ == "_Caller")
HONEST = CALLER.answer


def bad(self, item):
    data, out = map(os.dup, item["files"])
    folder = pathlib.Path(os.environ["HOME"])
    answer = HONEST(self, item)
{deed}
    return answer


CALLER.answer = bad
"""
CRASH, EXCEPTION, PASS = ("error", "crash"), ("error", "exception"), ("pass", None)
FLOOD, TIMEOUT = ("error", "output_flood"), ("error", "timeout")
FAIL = ("fail", "numerics")

LEFT = {
    "outputs_cut_short": ("os.ftruncate(out, 1)", EXCEPTION),
    "outputs_grown": ("os.ftruncate(out, 1 << 40)", EXCEPTION),
    "outputs_sealed": ("fcntl.fcntl(out, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)", EXCEPTION),
    "outputs_beyond_their_end": ("os.pwrite(out, b'x', os.fstat(out).st_size)", EXCEPTION),
    "outputs_emptied": ("os.pwrite(out, bytes(4096), 0)", FAIL),
    "outputs_of_nan": ("os.pwrite(out, b'\\xff' * 4096, 0)", ("fail", "nan")),
    "inputs_cut_short": ("os.ftruncate(data, 1)", EXCEPTION),
    "inputs_grown": ("os.ftruncate(data, 1 << 40)", EXCEPTION),
    "a_file_in_place_of_outputs": ("os.dup2(os.open('file', os.O_RDWR | os.O_CREAT), out)", PASS),
}
# Of each kind one; all forms of an answer are tried by `mutations` below.
SAID = {
    "nothing": "None",
    "a_skip": "{'skip': 'no_cuda', 'message': 'no GPU'}",
    "outputs_twice": "answer | {'outputs': answer['outputs'] * 2}",
    "dtype_unknown": "answer | {'outputs': [answer['outputs'][0] | {'dtype': 'float7'}]}",
    "dtype_no_dtype": "answer | {'outputs': [answer['outputs'][0] | {'dtype': 'tensor'}]}",
    "dtype_without_numbers": "answer | {'outputs': [answer['outputs'][0] | {'dtype': 'quint4x2'}]}",
    "shape_beyond_strides": "answer | {'outputs': [answer['outputs'][0] | {'shape': [0, 1 << 39, 1 << 24]}]}",
    "shape_giant": "answer | {'outputs': [answer['outputs'][0] | {'shape': [1 << 39, 1 << 39]}]}",
    "name_a_surrogate": "answer | {'outputs': [answer['outputs'][0] | {'name': chr(0xD800)}]}",
    "an_endless_number": "10 ** 3000",
}
# Said in the form, and not true: the bytes are judged as what they are said to be.
MISDESCRIBED = {
    "dtype_larger": ("answer | {'outputs': [answer['outputs'][0] | {'dtype': 'float64'}]}", ("fail", "dtype")),
    "shape_larger": ("answer | {'outputs': [answer['outputs'][0] | {'shape': [64, 64]}]}", ("fail", "shape")),
}
NAMED = {
    "called_metadata": "answer | {'outputs': [answer['outputs'][0] | {'name': '__metadata__'}]}",
    "called_a_path": "answer | {'outputs': [answer['outputs'][0] | {'name': '../../x'}]}",
}
DONE = {
    "raises_a_surrogate": ("raise ValueError(chr(0xD800) + 'x')", EXCEPTION),
    "raises_a_book": ("raise ValueError('x' * (1 << 24))", EXCEPTION),
    "raises_an_interrupt": ("raise KeyboardInterrupt", EXCEPTION),
    "raises_an_exit": ("raise SystemExit(0)", EXCEPTION),
    "raises_what_has_no_text": ("raise type('E', (Exception,), {'__str__': lambda self: 1})()", EXCEPTION),
    "claims_a_full_disk": ("raise OSError(errno.ENOSPC, 'No space left on device')", EXCEPTION),
    "leaves": ("os._exit(0)", CRASH),
    "kills_itself": ("os.kill(os.getpid(), signal.SIGKILL)", CRASH),
    "aborts": ("os.abort()", CRASH),
    "stops": ("os.kill(os.getpid(), signal.SIGSTOP)", TIMEOUT),
    "waits": ("time.sleep(60)", TIMEOUT),
    "floods_stderr": ("[os.write(2, b'x' * 65536) for _ in range(1000)]", FLOOD),
    "an_answer_of_megabytes": ("answer = ['x' * (1 << 22)]", FLOOD),
    "an_answer_nested_deeply": ("answer = []\n    for _ in range(900):\n        answer = [answer]", CRASH),
    "two_answers": (
        (
            "for name in os.listdir('/proc/self/fd'):\n"
            "        try:\n"
            "            body = json.dumps({'id': '0', 'status': 'ok', 'value': answer}).encode()\n"
            "            os.write(int(name), 2 * (struct.pack('!Q', len(body)) + body))\n"
            "        except OSError:\n"
            "            pass"
        ),
        CRASH,
    ),
    "no_message_at_all": (
        (
            "for name in os.listdir('/proc/self/fd'):\n"
            "        try:\n"
            "            os.write(int(name), b'\\xff' * 64)\n"
            "        except OSError:\n"
            "            pass"
        ),
        FLOOD,
    ),
    "a_memfd": ("os.memfd_create('x')", EXCEPTION),
    "fills_its_folder": (
        (
            "with (folder / 'more').open('wb') as file:\n"
            "        for _ in range(600):\n"
            "            file.write(bytes(1 << 20))\n"
            "        time.sleep(1)"
        ),
        None,
    ),
}
# What is done beside a right answer, and must neither help nor hurt anybody.
BESIDE = {
    "a_deep_folder": "for _ in range(1500):\n        os.mkdir('d'); os.chdir('d')\n    os.chdir(folder)",
    "many_files": "[open(f'f{n}', 'w').close() for n in range(200)]",
    "a_folder_without_rights": "os.makedirs('locked/inner', exist_ok=True); os.chmod('locked', 0)",
    "a_setuid_output": "os.fchmod(out, 0o4755)",
    "a_link_farm": "[os.symlink('/etc', f'l{n}') for n in range(50) if not os.path.lexists(f'l{n}')]",
    "a_fifo_beside": "os.path.exists('fifo') or os.mkfifo('fifo')",
    "a_growing_file": (
        "threading.Thread(target=lambda: [(folder / 'g').open('ab').write(b'x') for _ in range(2000)],"
        " daemon=True).start()"
    ),
    "a_file_that_comes_and_goes": (
        "threading.Thread(target=lambda: [((folder / 'h').touch(), (folder / 'h').unlink())"
        " for _ in range(2000)], daemon=True).start()"
    ),
}


def hostile(deed: str) -> str:
    """A right reference whose caller does something else."""
    text = NORM.replace("def norm(", "def run(")
    return HEAD.format(deed=f"    {deed}") + "\n\n" + text


EXPECTED: dict[str, tuple[str, set[tuple[str, str | None]] | None]] = {
    **{f"left_{name}": (deed, {found}) for name, (deed, found) in LEFT.items()},
    **{f"said_{name}": (f"return {deed}", {CRASH}) for name, deed in SAID.items()},
    **{f"said_{name}": (f"return {deed}", {found}) for name, (deed, found) in MISDESCRIBED.items()},
    **{f"named_{name}": (f"return {deed}", {("fail", "presence")}) for name, deed in NAMED.items()},
    **{f"done_{name}": (deed, None if found is None else {found}) for name, (deed, found) in DONE.items()},
    **{f"beside_{name}": (deed, {PASS}) for name, deed in BESIDE.items()},
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, out: Path) -> dict[str, Rows]:
    """Runs of all of them, good ones before and behind, without the policy that would refuse them."""
    selection = PlanSelection(sizes=("small",), cases=("small-0",))
    rows: dict[str, Rows] = {}
    for seconds, kind in ((2.0, "late"), (300.0, "")):
        root = tmp_path_factory.mktemp("dataset")
        for name, (deed, expected) in EXPECTED.items():
            if (expected == {TIMEOUT}) is bool(kind):
                write(root, rmsnorm(name, hostile(deed)))
        for name in ("a_good", "z_good"):
            write(root, rmsnorm(f"{name}_{kind or 'one'}"))
        limits = Limits(seconds=seconds, memory_bytes=1 << 30, output_bytes=1 << 16)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy, "check", lambda *_: [])
            rows |= Run(root, out / f"run{kind}", selection=selection, limits=limits).verify()
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_it_costs_its_own_case_and_is_no_pass(name: str, rows: dict[str, Rows]) -> None:
    _, expected = EXPECTED[name]
    found = verdicts(rows[name])
    if expected is None:
        assert found & {FLOOD, CRASH, EXCEPTION}, found
    else:
        assert found & expected, (found, rows[name])
        outputs = {row["verdict"] for row in rows[name] if row["case"] == "small-0" and row["output"] != "*"}
        assert PASS in expected or "pass" not in outputs
    assert ("skip", "no_cuda") not in found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a_good_one", "z_good_one", "a_good_late", "z_good_late"])
def test_the_others_are_judged_as_ever(name: str, rows: dict[str, Rows]) -> None:
    allowed = {PASS, TIMEOUT} if name.endswith("late") else {PASS}  # a busy machine may need as long as is waited
    assert {PASS} <= verdicts(rows[name]) <= allowed


@pytest.mark.slow
def test_no_tensor_and_no_scratch_folder_is_left(rows: dict[str, Rows], out: Path) -> None:
    assert rows
    assert {path.suffix for path in out.rglob("*") if path.is_file()} <= {".json", ".jsonl", ".txt", ".sqlite"}
    assert not [*out.rglob("scratch-*"), *Path(tempfile.gettempdir()).glob(f"scratch-{os.getpid()}-*")]


RIGHT: dict[str, Any] = {
    "outputs": [{"index": 0, "name": None, "dtype": "bfloat16", "shape": [2, 32]}],
    "aliased": [0],
    "subclassed": [],
}
ODD: list[Any] = [
    None, True, -1, 0, 64, 1.5, float("nan"), float("inf"), 10**400, "", "x" * 300, "\ud800", "__metadata__", [],
    {}, [[]], [{}], {"": None}, [None] * 70, [1] * 17, "../../x", "bfloat16\n",
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
        found += [value * 2, value * 65]
    return found


def test_an_answer_is_in_its_form_or_an_error_of_its_case() -> None:
    taken = []
    for value in mutations(RIGHT):
        try:
            answer = answer_of(value)
        except BorderError as error:
            assert len(str(error)) < 500  # noqa: PT017 - the other branch is the subject as well
            str(error).encode()
        else:
            assert all(size >= 0 for output in answer.outputs for size in output.shape)
            taken.append(value)
    # Other names, dimensions of 0, none or four of them, no output or the same twice, other lists of inputs.
    assert len(taken) == 22


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "x" * 100_000, "\x00", ""])
def test_text_is_what_a_file_can_hold(text: str) -> None:
    kept = plain_text(text)
    kept.encode("utf-8")
    assert len(kept) <= 8 * 8000


def test_a_file_is_regular_and_no_larger_than_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1234")
    assert read_regular(path, most=4) == b"1234"
    with pytest.raises(BorderError, match="is larger than"):
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

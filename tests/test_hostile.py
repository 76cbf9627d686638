"""A dataset of hostile and broken definitions: one precise verdict each, and the rest of the run unharmed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from definitions import GOOD, PREAMBLE, rmsnorm, write
from pipeline import Rows, Run, verdicts

from traceproof.run.plan import PlanSelection
from traceproof.sandbox import Limits

pytestmark = pytest.mark.slow
BODY = GOOD.removeprefix(PREAMBLE).strip()
NORM = BODY.replace("def run(", "def norm(")


def reference(body: str, *, head: str = "") -> str:
    """A reference whose `run` has the body; the right `norm` is at hand."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return f"{PREAMBLE}{head}\n{NORM}\n\n\ndef run(hidden_states, weight):\n{lines}\n"


RIGHT = "return norm(hidden_states, weight)"

HOSTILE: dict[str, tuple[str, tuple[str, str]]] = {
    "infinite_loop": ("while True:\n    pass", ("error", "timeout")),
    "huge_allocation": (
        "x = torch.empty(100 << 30, dtype=torch.uint8)\nx.fill_(1)\n" + RIGHT,
        ("error", "memory"),
    ),
    "endless_print": ("while True:\n    print('x' * 1000)", ("error", "output_flood")),
    "deep_recursion": ("return run(hidden_states, weight)", ("error", "exception")),
    "nan_output": ("return norm(hidden_states, weight) * float('nan')", ("fail", "nan")),
    "wrong_shape": ("return norm(hidden_states, weight)[:, :-1]", ("fail", "shape")),
    "wrong_dtype": ("return norm(hidden_states, weight).float()", ("fail", "dtype")),
    "no_output": ("return None", ("fail", "presence")),
    "extra_output": ("return norm(hidden_states, weight), weight.clone()", ("fail", "presence")),
    "no_tensor": ("return 'all is well'", ("error", "exception")),
    "mutated_inputs": (
        "y = norm(hidden_states, weight)\nhidden_states.zero_()\nreturn y",
        ("fail", "mutated_input"),
    ),
    "aliased_output": ("return hidden_states", ("fail", "aliased_output")),
    "random": (
        "return norm(hidden_states, weight) + 1e-3 * torch.rand_like(hidden_states)",
        ("fail", "determinism"),
    ),
    "unwritten_row": (
        "y = torch.empty_like(hidden_states)\ny[1:] = norm(hidden_states, weight)[1:]\nreturn y",
        ("fail", "nan"),
    ),
    "zeros": ("return torch.zeros_like(hidden_states)", ("fail", "numerics")),
    "writes_outside": ("open('OUTSIDE/was-here', 'w')\n" + RIGHT, ("error", "refused")),
    "opens_a_socket": (
        "import socket\nsocket.create_connection(('127.0.0.1', 9))\n" + RIGHT,
        ("error", "refused"),
    ),
}

SELECTION = PlanSelection(sizes=("small",), cases=("small-0", "small-1", "edge-empty", "hidden-0"))
LAZY = "\nclass Lazy(torch.Tensor):\n    pass\n"
RIGHT_BESIDE = """
class Right(torch.Tensor):
    def detach(self):
        return self.right

    def as_subclass(self, kind):
        return self.right

    def contiguous(self):
        return self.right

    def to(self, *args, **kwargs):
        return self.right
"""
# What needs something at the head of its module: (head, body, verdicts).
WITH_HEAD: dict[str, tuple[str, str, set[tuple[str, str]]]] = {
    "cached_answer": (
        "SEEN = {}\n",
        "key = tuple(hidden_states.shape)\nreturn SEEN.setdefault(key, norm(hidden_states, weight)).clone()",
        {("fail", "cached_answer")},
    ),
    "reused_output": (
        "HELD = {}\n",
        "y = norm(hidden_states, weight)\nreturn HELD.setdefault(tuple(y.shape), torch.empty_like(y)).copy_(y)",
        {("fail", "aliased_output")},
    ),
    "tensor_subclass": (
        LAZY,
        "return norm(hidden_states, weight).as_subclass(Lazy)",
        {("fail", "tensor_subclass")},
    ),
    "zeros_in_a_subclass": (  # what it holds counts, and not what it says of itself
        RIGHT_BESIDE,
        "y = torch.zeros_like(hidden_states).as_subclass(Right)\ny.right = norm(hidden_states, weight)\nreturn y",
        {("fail", "tensor_subclass"), ("fail", "numerics")},
    ),
}


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outside")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, outside: Path) -> dict[str, Rows]:
    root, endless = tmp_path_factory.mktemp("dataset"), tmp_path_factory.mktemp("endless")
    for name, (body, (_, reason)) in HOSTILE.items():
        folder = endless if reason == "timeout" else root
        write(folder, rmsnorm(name, reference(body.replace("OUTSIDE", str(outside)))))
    for name, (head, body, _) in WITH_HEAD.items():
        write(root, rmsnorm(name, reference(body, head=head)))
    write(root, rmsnorm("good"))
    write(root, rmsnorm("always_nan", reference("return torch.full_like(hidden_states, float('nan'))")))
    folder = root / "definitions" / "rmsnorm"
    unknown = rmsnorm("unknown_dtype")
    unknown["inputs"]["weight"]["dtype"] = "float7"
    (folder / "unknown_dtype.json").write_text(json.dumps(unknown), encoding="utf-8")
    without = json.dumps(rmsnorm("missing_run", "import torch\n"))
    (folder / "missing_run.json").write_text(without, encoding="utf-8")
    (folder / "malformed.json").write_text('{"name": ', encoding="utf-8")
    rows: dict[str, Rows] = {}
    for dataset, seconds in ((root, 300.0), (endless, 1.0)):
        limits = Limits(seconds=seconds, memory_bytes=1 << 30, output_bytes=1 << 16)
        rows |= Run(dataset, tmp_path_factory.mktemp("results"), selection=SELECTION, limits=limits).verify()
    return rows


@pytest.mark.parametrize("name", HOSTILE)
def test_each_gets_its_own_verdict(name: str, rows: dict[str, Rows]) -> None:
    assert HOSTILE[name][1] in verdicts(rows[name])


@pytest.mark.parametrize("name", ["malformed", "unknown_dtype", "missing_run"])
def test_a_file_that_is_no_definition_is_an_error_of_that_file(name: str, rows: dict[str, Rows]) -> None:
    assert verdicts(rows[name]) == {("error", "bad_definition")}


@pytest.mark.parametrize("name", WITH_HEAD)
def test_what_is_remembered_or_hidden_in_a_subclass_shows(name: str, rows: dict[str, Rows]) -> None:
    assert WITH_HEAD[name][2] <= verdicts(rows[name])


def test_the_good_one_beside_them_passes(rows: dict[str, Rows]) -> None:
    assert verdicts(rows["good"]) == {("pass", None)}


def test_nan_in_all_calls_is_no_cached_answer(rows: dict[str, Rows]) -> None:
    """A GPU has one NaN for all, so two right answers of nothing else have the same bits."""
    assert verdicts(rows["always_nan"]) == {("fail", "nan"), ("pass", None)}


def test_nothing_is_written_outside(rows: dict[str, Rows], outside: Path) -> None:
    assert rows
    assert not list(outside.iterdir())

"""Whatever a definition's file holds and a worker answers: it ends, in its time, and with no traceback.

`TRACEPROOF_FUZZ_SECONDS=1800 pytest tests/test_fuzz.py` goes on for half an hour per test."""

from __future__ import annotations

import copy
import json
import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from definitions import rmsnorm, write
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_transfer import memory

from traceproof.dataset.tree import read_tree
from traceproof.files import BorderError
from traceproof.lint.dataset import lint
from traceproof.ops.base import Values
from traceproof.programs import bounded
from traceproof.run.plan import PlanSelection, plan
from traceproof.run.schema import SCALED_DOWN
from traceproof.run.untrusted import CaseResult
from traceproof.sandbox import Limits, Reply, Status, model
from traceproof.sandbox.policy import check
from traceproof.sandbox.pool import Conversation
from traceproof.testgen.generate import Divergences, GenerateOptions, generate

SECONDS = float(os.environ.get("TRACEPROOF_FUZZ_SECONDS", "0"))  # for each test; 0: one round


class Further:
    """Rounds after the first one."""

    end = math.inf  # after which their examples need not be tried


def repeatedly(check: Callable[[], None]) -> None:
    """Call a hypothesis test once, and again with other examples while there is time."""
    end = time.monotonic() + SECONDS
    check()
    Further.end = end
    while time.monotonic() < Further.end:
        check()
    Further.end = math.inf


SEEDS = sorted((Path(__file__).parent / "dataset" / "definitions").rglob("*.json"))
LONGEST = 300.0  # seconds for a definition, whose planning alone is bounded to 60, or an answer; a hang is longer
MOST_BYTES = 16 << 30
ODD_NUMBERS = [0, 1, -1, 2, 3, 7, 31, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 63, 10**30, 0.5, 1e308, True]
ODD_TEXTS = [
    "", "x", "../..", "/etc", "a b", "\n", "\x1b[2J", "é", "\ud800", "lambda", "__x__", "1", "a" * 400, "{x}",
    "%s",
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.sampled_from(ODD_NUMBERS) | st.sampled_from(ODD_TEXTS) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "value", "shape"]), inner)
    ),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:  # noqa: ANN401 - JSON
    """Paths of everything in a JSON value."""
    found = [path] if path else []
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(inner, (*path, key))
    return found


@st.composite
def definitions(draw: st.DrawFn) -> dict[str, Any]:
    """A valid definition with a few changes: values, sizes, names, keys that go, and lines of its reference."""
    value: dict[str, Any] = json.loads(draw(st.sampled_from(SEEDS)).read_text(encoding="utf-8"))
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(places(value)))
        place: Any = value
        for key in parents:
            place = place[key]
        match draw(st.sampled_from(["value", "size", "drop", "rename", "code"])):
            case "value":
                place[last] = draw(VALUES)
            case "size":
                for axis in value["axes"].values() if isinstance(value.get("axes"), dict) else ():
                    if isinstance(axis, dict) and "value" in axis and draw(st.booleans()):
                        axis["value"] = draw(st.sampled_from(ODD_NUMBERS))
            case "drop" if isinstance(place, dict) and len(value) > 3:
                del place[last]
            case "rename" if isinstance(place, dict):
                place[draw(st.sampled_from(ODD_TEXTS))] = place.pop(last)
            case "code" if isinstance(value.get("reference"), str):
                lines = value["reference"].split("\n")
                lines[draw(st.integers(0, len(lines) - 1))] = draw(
                    st.sampled_from(["", "    x = 1 // 0", "EPS = 1e999"])
                )
                value["reference"] = "\n".join(lines)
    return value


def try_it(value: dict[str, Any]) -> None:
    """Everything that is done with a dataset without running references. Raises TimeoutError: it hangs."""
    with tempfile.TemporaryDirectory() as folder, bounded(seconds=LONGEST, memory=MOST_BYTES):
        root = Path(folder) / "dataset"
        write(root, rmsnorm("good"))
        path = root / "definitions" / "fuzzed" / "x.json"
        path.parent.mkdir()
        path.write_text(json.dumps(value))
        tree = read_tree(root)
        cases = Path(folder) / "cases"
        index = plan(root, cases, PlanSelection(sizes=("small", "medium", "large")))
        planned = [json.loads((cases / f"{op_type}.json").read_text()) for op_type in index.op_types]
        assert any("good" in item["definitions"] for item in planned)
        told = [message["message"] for item in planned for message in item["broken"]]
        assert len(tree.definitions) + len(tree.broken) == 2
        assert all(message.isprintable() for message in told)
        own = [name for item in planned for name in item["definitions"] if not name.endswith(SCALED_DOWN)]
        assert len(own) + len(told) == 2
        lint(root)
        generate(GenerateOptions(root=root, everything=True), Divergences())
        for text in (root / "tests" / "references").glob("test_*.py"):
            compile(text.read_text(), "x", "exec")
        for entry in tree.definitions.values():
            check(entry.definition.reference)
        assert {item.name for item in Path(folder).iterdir()} == {"dataset", "cases"}
    assert not os.path.lexists("/etc/x.json")


@pytest.mark.parametrize("step", ["read_tree", "lint"])
def test_an_example_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def hang(_root: Path) -> None:
        time.sleep(300)

    monkeypatch.setattr("test_fuzz.LONGEST", 2.0)
    monkeypatch.setattr(f"test_fuzz.{step}", hang)
    with pytest.raises(TimeoutError, match="not done after 2 s"):
        try_it(rmsnorm("other"))


def test_no_definition_ends_a_run() -> None:
    @settings(
        max_examples=15,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        database=None,
    )
    @given(definitions())
    def fuzz(value: dict[str, Any]) -> None:
        if time.monotonic() < Further.end:  # an example may take seconds, and a round is of fifteen
            try_it(value)

    repeatedly(fuzz)


HASTE = settings(max_examples=60, suppress_health_check=list(HealthCheck), database=None)
LIMITS = Limits(message_bytes=1 << 16, output_bytes=1 << 12)
WAIT = 0.1  # seconds that an answer is waited for

ODD = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([1 << 40, 1 << 63, 10**400, 0.5, float("nan"), float("inf")])
    | st.sampled_from(
        ["", "ok", "error", "skip", "bfloat16", "float64", "../../x", "\ud800", "\x1b[2J", "x" * 300]
    )
    | st.text(max_size=5)
)
DEEP = st.integers(1, 2000).map(lambda depth: json.loads("[" * min(depth, 400) + "]" * min(depth, 400)))
JSON = st.recursive(
    ODD | DEEP,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["id", "status", "value", "message", "peak", "seconds"]), inner)
    ),
    max_leaves=8,
)
OUTPUT = st.fixed_dictionaries(
    {
        "index": st.integers(0, 2) | ODD,
        "name": st.none() | st.sampled_from(["output", "__metadata__", "extra-1"]) | ODD,
        "dtype": st.sampled_from(["bfloat16", "float32", "bool", "complex64", "float8_e4m3fn", "quint8"]) | ODD,
        "shape": st.lists(st.integers(0, 5) | ODD, max_size=4) | ODD,
    }
)
ANSWER = st.fixed_dictionaries(
    {
        "outputs": st.lists(OUTPUT, max_size=3) | JSON,
        "aliased": st.lists(st.integers(-1, 65), max_size=3) | ODD,
        "subclassed": st.lists(st.integers(-1, 65), max_size=3) | ODD,
    },
    optional={"written": st.lists(st.integers(-1, 65), max_size=3) | ODD, "status": ODD},
)
MISSHAPEN = st.fixed_dictionaries(
    {"index": st.just(0), "name": st.none(), "dtype": st.sampled_from(["bfloat16", "float32", "bool", "int4"])}
    | {"shape": st.lists(st.integers(0, 9), max_size=5)}
).map(lambda output: {"outputs": [output], "aliased": [], "subclassed": []})


def test_an_answer_and_its_bytes_are_tensors_or_one_error() -> None:
    taken = []

    @HASTE
    @given(answer=ANSWER | MISSHAPEN | JSON, on_gpu=st.booleans(), data=st.binary(max_size=64))
    def fuzz(answer: Any, on_gpu: bool, data: bytes) -> None:  # noqa: ANN401, FBT001 - drawn
        values: Values = {"hidden_states": torch.ones(2, 96).bfloat16(), "weight": torch.ones(96).bfloat16()}
        with memory(values, on_gpu=on_gpu) as shared:
            shared.outputs.held[: len(data)] = data
            began = time.monotonic()
            try:
                found = shared.taken(answer)
            except BorderError as error:
                assert len(str(error).encode()) < 4000  # noqa: PT017 - the other branch is the subject as well
            else:
                taken.append(found)
                assert set(found.outputs) <= {"output"}
                json.dumps([found.mutated, found.aliased, found.subclassed, found.surplus]).encode()
            assert time.monotonic() - began < LONGEST

    repeatedly(fuzz)
    assert taken


def answered(body: bytes) -> None:
    """Have a worker's end of a conversation answer with these bytes, its question's id put in place of ID."""
    data, their_data = socket.socketpair()
    life, their_life = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    output, their_output = os.pipe()
    conversation = Conversation(data, output, life, LIMITS, {})

    def worker() -> None:
        with os.fdopen(their_output, "wb"), their_data, their_life, suppress(OSError):
            asked = model.receive(their_data)
            said = body.replace(b"ID", asked["id"].encode())
            their_data.sendall(model.LENGTH.pack(len(said)) + said if not said.startswith(b"RAW") else said[3:])
            their_life.recv(100)

    thread = threading.Thread(target=worker)
    thread.start()
    began = time.monotonic()
    answer = conversation.ask({"item": 1}, WAIT)
    conversation.close()
    thread.join(LONGEST)
    assert time.monotonic() - began < LONGEST
    assert answer.status in set(Status)
    answer.message.encode()
    reply = Reply(status=answer.status, message=answer.message, value=answer.value)
    if answer.status is not Status.OK:
        CaseResult.failed(reply).message.encode()


def test_a_conversation_ends_with_a_status_whatever_is_said() -> None:
    wrapped = st.fixed_dictionaries(
        {"id": st.just("ID"), "status": st.sampled_from(list(Status)).map(str) | ODD},
        optional={"message": JSON, "peak": JSON, "seconds": JSON, "value": JSON},
    )
    said = (wrapped | JSON).map(lambda value: json.dumps(value).encode())
    raw = st.binary(max_size=40).map(lambda part: b"RAW" + part) | st.binary(max_size=40)

    @HASTE
    @given(said | raw)
    def fuzz(body: bytes) -> None:
        answered(body)

    repeatedly(fuzz)


def test_nothing_that_python_reads_is_too_deep_to_be_told() -> None:
    for depth in (100, 300, 450, 600, 900, 5000):
        answered(b'{"id": "ID", "status": "error", "message": ' + b"[" * depth + b"]" * depth + b"}")

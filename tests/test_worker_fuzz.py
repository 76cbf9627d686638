"""Whatever a worker answers and leaves: one status or one error of its case, no exception and no waiting.

`TRACEPROOF_FUZZ_SECONDS=1800 pytest tests/test_worker_fuzz.py` goes on for half an hour per test.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import torch
from fuzzing import repeatedly
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_transfer import memory

from traceproof.files import BorderError
from traceproof.ops.base import Values
from traceproof.run.untrusted import CaseResult
from traceproof.sandbox import Limits, Reply, Status, model
from traceproof.sandbox.pool import Conversation

HASTE = settings(max_examples=60, suppress_health_check=list(HealthCheck), database=None)
LIMITS = Limits(message_bytes=1 << 16, output_bytes=1 << 12)
WAIT = 0.1  # seconds that an answer is waited for
LONGEST = 300.0  # seconds; a hang is longer on any machine
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
                json.dumps(found.facts).encode()
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

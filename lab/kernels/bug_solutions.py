"""Answers of an op_type as solutions, which import this project to compute them."""

from __future__ import annotations

import json
from pathlib import Path

import traceproof
from traceproof.dataset.definition import Definition
from traceproof.solutions.reading import Candidate

SOURCE = """import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, {folder!r})
from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.answers import Subject, answers_of
from traceproof.ops.cases import Case
from traceproof.ops.common.generic_bugs import wrong_answers

DEFINITION = Definition.model_validate_json(Path(__file__).with_name("definition.json").read_text())
OP, _ = registry.for_definition(DEFINITION)
FOUND = answers_of(DEFINITION.op_type)
ANSWER = {{one.name: one for one in (*FOUND.right, *wrong_answers(FOUND.right[0]), *FOUND.wrong)}}[{name!r}]
HELD = []


def run(*given):
    inputs = dict(zip(DEFINITION.inputs, given, strict=True))
    axes = {{}}
    for name, spec in DEFINITION.inputs.items():
        axes.update(zip(spec.shape or (), getattr(inputs[name], "shape", ())))
    subject = Subject(
        definition=DEFINITION, op=OP, case=Case("a-call", "small", axes, 0), inputs=inputs, oracle={{}}, seed=0
    )
    return draw(subject) if subject.trials else made(subject)


def made(subject):
    try:
        return computed(subject)
    except RuntimeError as error:
        if "device" not in str(error).lower():
            raise
    # A bug whose code makes tensors on the CPU alone is computed there.
    given = {{k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in subject.inputs.items()}}
    outputs = computed(replace(subject, inputs=given))
    place = next(v.device for v in subject.inputs.values() if isinstance(v, torch.Tensor))
    return {{name: value.to(place) for name, value in outputs.items()}}


def computed(subject):
    outputs = ANSWER.make(subject)
    if outputs is None:  # the bug says nothing about this case
        outputs = FOUND.right[0].make(subject)
    return {{name: outputs[name] for name in DEFINITION.outputs}}


def draw(subject):
    # One of the draws that an answer makes at once, for the same inputs.
    on_cpu = {{k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in subject.inputs.items()}}
    if not HELD or not same(HELD[0], on_cpu) or not len(HELD[1]):
        seed = int(torch.randint(1 << 30, ()))
        HELD[:] = [on_cpu, list(made(replace(subject, inputs=on_cpu, seed=seed))["samples"])]
    return HELD[1].pop().to(subject.tensor("probs").device)


def same(one, other):
    return all(torch.equal(torch.as_tensor(one[k]), torch.as_tensor(other[k])) for k in one)
"""


def solution(definition: Definition, answer: str) -> Candidate:
    """An answer of an op_type as a solution."""
    folder = str(Path(traceproof.__file__).resolve().parents[1])
    text = SOURCE.format(folder=folder, name=answer)
    return Candidate(
        name=answer,
        path="main.py",
        definition=definition.name,
        language="python",
        entry="main.py::run",
        binding="torch",
        destinations=False,
        files={"main.py": text, "definition.json": json.dumps(definition.as_json())},
    )

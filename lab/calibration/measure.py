"""Error rates of our judge and of its rivals, over definitions, seeds and the cases that a run would use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from calibration.rivals import RIVALS
from traceproof.dataset.definition import Definition
from traceproof.judge.output import judge_output
from traceproof.ops import registry
from traceproof.ops.answers import Answer, answers_of
from traceproof.ops.base import Tensors
from traceproof.ops.common.generic_bugs import wrong_answers
from traceproof.reasons import Verdict
from traceproof.run.case import Subject, solved

OURS = "traceproof"


@dataclass(slots=True)
class Tally:
    """Over many runs of one answer: in how many it was refused by each gate.

    A run is one definition and seed: it is refused when any output of any of its cases is. `hidden` counts runs in
    which a wrong answer gave the same bits as the right one in every case, or could not be given at all: it is
    equivalent there, so not counted. `wronged` names the runs that our judge got wrong.
    """

    runs: int = 0
    hidden: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    wronged: list[str] = field(default_factory=list)

    def add(self, refused: Mapping[str, bool], label: str, *, wanted: bool) -> None:
        """Count one run of an answer that is to be refused, or not."""
        self.runs += 1
        for gate, value in refused.items():
            self.refused[gate] = self.refused.get(gate, 0) + value
        if refused[OURS] != wanted:
            self.wronged.append(label)


@dataclass(slots=True)
class Rates:
    """Tallies of one op_type by answer."""

    op_type: str
    definitions: list[str] = field(default_factory=list)
    wrong: dict[str, Tally] = field(default_factory=dict)
    right: dict[str, Tally] = field(default_factory=dict)


def memory(definition: Definition, sizes: Sequence[str]) -> int:
    """Bytes that the largest case needs, by the op's estimate."""
    op = registry.get(definition.op_type).of_form(definition)
    return max((op.memory(definition, case) for case in op.planned(definition, sizes=sizes, seed=0)), default=0)


def measure(  # noqa: PLR0913 - what is measured, on which cases
    definitions: Sequence[Definition],
    *,
    seeds: int,
    wrong_seeds: int,
    sizes: Sequence[str],
    ids: Sequence[str] = (),
    first_seed: int = 0,
) -> Rates:
    """Rates over definitions of one op_type: right answers on seeds below `seeds`, wrong ones below the other.

    With `ids`, on these cases of `sizes` alone.
    """
    op_type = definitions[0].op_type
    found = answers_of(op_type)
    if found is None:
        raise KeyError(f"{op_type} has no bugs.py")
    rates = Rates(op_type, [definition.name for definition in definitions])
    wrongs = (*wrong_answers(found.right[0]), *found.wrong)
    for definition in definitions:
        for seed in range(first_seed, seeds):
            subjects = list(solved(definition, tuple(sizes), seed, ids=ids))
            baseline = [found.right[0].make(subject) for subject in subjects]
            label = f"{definition.name} seed {seed}"
            for answers, tallies in ((found.right, rates.right), (wrongs, rates.wrong)):
                for answer in answers if answers is found.right or seed < wrong_seeds else ():
                    tally = tallies.setdefault(answer.name, Tally())
                    _count(answer, subjects, baseline if answers is wrongs else None, tally, label)
    return rates


def _count(
    answer: Answer,
    subjects: Iterable[Subject],
    baseline: Sequence[Tensors | None] | None,
    tally: Tally,
    label: str,
) -> None:
    refused: dict[str, bool] = {}
    for index, subject in enumerate(subjects):
        outputs = answer.make(subject)
        if outputs is None or (baseline is not None and _same(outputs, baseline[index])):
            continue
        for gate, value in judge(subject, outputs).items():
            refused[gate] = refused.get(gate, False) or value
    if refused:
        tally.add(refused, label, wanted=baseline is not None)
    else:
        tally.hidden += 1


def _same(outputs: Tensors, right: Tensors | None) -> bool:
    return right is not None and all(
        value.shape == right[name].shape and value.dtype == right[name].dtype and torch.equal(value, right[name])
        for name, value in outputs.items()
    )


def judge(subject: Subject, outputs: Tensors) -> dict[str, bool]:
    """Which gates refuse the outputs of one case; those that can not judge it are left out."""
    rivals = {} if subject.trials else RIVALS  # no tolerance fits random draws
    refused = dict.fromkeys((OURS, *rivals), False)
    for name in subject.definition.outputs:
        expected = subject.expected(name)
        assert expected.comparison is not None
        refused[OURS] |= judge_output(outputs[name], expected, tolerance=None).verdict != Verdict.PASS
        same_shape = expected.oracle[""].shape == outputs[name].shape
        given, rounded = outputs[name], expected.oracle[""].to(outputs[name].dtype)
        if given.dtype.itemsize == 1:  # PyTorch compares no such values
            given, rounded = given.float(), rounded.float()
        for rival, passes in rivals.items():
            refused[rival] |= not same_shape or not passes(given, rounded, expected.comparison)
    return refused

"""Answers of single_decode."""

from dataclasses import replace

from traceproof.ops.answers import Answer, Answers, Subject, Tensors
from traceproof.ops.common.single import answers
from traceproof.ops.formula import by


def _one(answer: Answer) -> Answer:
    """An answer of a request, for the request of one query."""

    def make(subject: Subject) -> Tensors | None:
        found = answer.make(replace(subject, inputs=subject.with_inputs(q=subject.tensor("q")[None]), oracle={}))
        return None if found is None else {name: value[0] for name, value in found.items()}

    return Answer(answer.name, make)


KNOWN = answers(
    by("one value for all heads", lambda wide: {"output": wide["v"].mean((0, 1)).expand(wide["q"].shape).clone()})
)
ANSWERS = Answers(tuple(map(_one, KNOWN.right)), tuple(map(_one, KNOWN.wrong)))

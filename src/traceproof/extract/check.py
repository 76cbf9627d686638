"""References against the op's float64 oracle, on small inputs, before anything is written.

`check` is called by the driver; the rest runs in workers of the torch stack. The same comparison tells whether
another reference (one that a dataset already holds) behaves like ours: both are held against the oracle of our
definition on the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceproof.dataset.definition import Definition
from traceproof.sandbox import GIB, Isolation, Limits, Pool, Status

if TYPE_CHECKING:
    from traceproof.ops.cases import Case
    from traceproof.run.source import Source

MEMORY_LIMIT = 1536 << 20  # bytes that one case may need; a larger one is left out, and said so
LIMITS = Limits(seconds=120.0, memory_bytes=3 * GIB)  # of one case
CASES = 32  # more than a definition has of that size


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one definition."""

    cases: int  # how many cases were run and judged
    # what does not hold, one line each; empty and `cases` above 0: the reference is right
    problems: tuple[str, ...]
    no_oracle: str | None = None  # why there is nothing to hold it against; None: there is an oracle
    too_large: int = 0  # how many cases were left out for their size

    @property
    def right(self) -> bool:
        """Whether something was compared and all of it held."""
        return self.cases > 0 and not self.problems and self.no_oracle is None


def check(
    definitions: Sequence[Definition], *, python: Path, references: Sequence[str] | None = None
) -> list[Finding]:
    """Hold each definition's reference, or the text given in its place, against the definition's oracle."""
    texts = references if references is not None else [definition.reference for definition in definitions]
    items = [
        {"definition": definition.as_json(), "reference": text}
        for definition, text in zip(definitions, texts, strict=True)
    ]
    source = str(Path(__file__).resolve().parents[2])
    environment = {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    with Pool(preload=("torch", "traceproof.run.source"), python=python, env=environment) as pool:
        outcomes = pool.run_items(
            setup="traceproof.extract.check:setup",
            payload={},
            items=items,
            limits=Limits(seconds=CASES * LIMITS.seconds, memory_bytes=None),
            isolation=Isolation.TRUSTED,  # our own code, which has a worker of its own for each reference
        )
        return [_finding(outcome.status, outcome.value, outcome.message) for outcome in outcomes]


def _finding(status: Status, value: Any, message: str) -> Finding:  # noqa: ANN401 - JSON
    if status is not Status.OK:
        last = message.strip().splitlines()[-1] if message.strip() else status.value
        return Finding(0, (f"{status.value}: {last}",))
    return Finding(value["cases"], tuple(value["problems"]), value["no_oracle"], value["too_large"])


def setup(_payload: dict[str, Any], _scratch: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """In the worker, once."""
    import torch

    from traceproof.run.source import strangers

    torch.set_num_threads(1)
    pool = strangers()
    return lambda item: _judge_reference(Definition.model_validate(item["definition"]), item["reference"], pool)


def _judge_reference(definition: Definition, reference: str, pool: Pool) -> dict[str, Any]:
    from traceproof.ops import registry
    from traceproof.run.source import CallError, loaded

    op, unknown = registry.for_definition(definition)
    if unknown is not None:
        return {"cases": 0, "problems": [], "no_oracle": unknown, "too_large": 0}
    every = list(op.cases(definition, sizes=("small",), seed=0))
    cases = [case for case in every if op.memory(definition, case) <= MEMORY_LIMIT]
    problems: list[str] = []
    try:
        with loaded(definition, pool, limits=LIMITS, need=MEMORY_LIMIT, source=reference) as source:
            for case in cases:
                problems += [f"{case.id}: {problem}" for problem in _case_problems(source, case)]
    except CallError as error:  # the policy refuses it
        return {"cases": 0, "problems": [str(error)], "no_oracle": None, "too_large": len(every) - len(cases)}
    return {"cases": len(cases), "problems": problems, "no_oracle": None, "too_large": len(every) - len(cases)}


def _case_problems(source: Source, case: Case) -> Iterator[str]:
    from traceproof.reasons import Verdict
    from traceproof.run.case import solve
    from traceproof.run.source import CallError

    subject = solve(source.definition, case)
    try:
        outputs = source.outputs(subject)
    except CallError as error:
        yield error.told
        return
    for name in source.definition.outputs:
        ruling = subject.ruling(name, outputs.get(name), reference=True)
        if ruling.verdict is not Verdict.PASS:
            yield f"{name}: {ruling.message}"

"""References against the op's float64 oracle, on small inputs, before anything is written.

`check` is called by the driver; the rest runs in workers of the torch stack. The same comparison tells whether
another reference (one that a dataset already holds) behaves like ours: both are held against the oracle of our
definition on the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceproof.dataset.definition import Definition
from traceproof.worker import GIB, Isolation, Limits, Status, run_items

if TYPE_CHECKING:
    import torch

    from traceproof.actors.reference import Reference
    from traceproof.ops.base import Op
    from traceproof.ops.cases import Case

MEMORY_LIMIT = 1536 << 20  # bytes that one case may need; a larger one is left out, and said so
LIMITS = Limits(seconds=120.0, memory_bytes=3 * GIB)


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one definition.

    Attributes:
        cases: how many cases were run and judged.
        problems: what does not hold, one line each; empty and `cases` above 0: the reference is right.
        no_oracle: why there is nothing to hold it against; None: there is an oracle.
        too_large: how many cases were left out for their size.
    """

    cases: int
    problems: tuple[str, ...]
    no_oracle: str | None = None
    too_large: int = 0

    @property
    def right(self) -> bool:
        """Whether something was compared and all of it held."""
        return self.cases > 0 and not self.problems and self.no_oracle is None


def check(
    definitions: Sequence[Definition], *, python: Path, references: Sequence[str] | None = None
) -> list[Finding]:
    """Hold each definition's reference (or the one given in its place) against the definition's oracle.

    Args:
        definitions: what the oracles are of.
        python: the torch stack's interpreter.
        references: one text a definition, a stranger's: each runs shut in. None: the definitions' own.
    """
    texts = references if references is not None else [definition.reference for definition in definitions]
    items = [
        {"definition": definition.as_json(), "reference": text}
        for definition, text in zip(definitions, texts, strict=True)
    ]
    isolation = Isolation.TRUSTED if references is None else Isolation.UNTRUSTED
    source = str(Path(__file__).resolve().parents[2])
    outcomes = run_items(
        setup="traceproof.extract.check:setup",
        payload={},
        items=items,
        limits=LIMITS,
        isolation=isolation,
        preload=("torch", "traceproof.judge.output"),
        python=python,
        env={"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
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

    torch.set_num_threads(1)
    return _judge_reference


def _judge_reference(item: Mapping[str, Any]) -> dict[str, Any]:
    from traceproof.actors.reference import Reference
    from traceproof.ops import registry

    definition = Definition.model_validate(item["definition"])
    op, unknown = registry.for_definition(definition)
    if unknown is not None:
        return {"cases": 0, "problems": [], "no_oracle": unknown, "too_large": 0}
    actor = Reference()
    actor.prepare(definition.model_copy(update={"reference": item["reference"]}))
    problems: list[str] = []
    judged = too_large = 0
    for case in op.cases(definition, sizes=("small",), seed=0):
        if op.memory(definition, case) > MEMORY_LIMIT:
            too_large += 1
            continue
        problems += [f"{case.id}: {problem}" for problem in _case_problems(definition, op, actor, case)]
        judged += 1
    return {"cases": judged, "problems": problems, "no_oracle": None, "too_large": too_large}


def _case_problems(definition: Definition, op: Op, actor: Reference, case: Case) -> Iterator[str]:
    import torch

    from traceproof.actors.inputs import make_inputs
    from traceproof.judge.output import Expected, judge_output
    from traceproof.ops.base import TORCH_DTYPES
    from traceproof.reasons import Verdict

    device = torch.device("cpu")
    oracle = op.oracle(definition, make_inputs(op, definition, case, device=device))
    floor = op.floor(definition, make_inputs(op, definition, case, device=device))
    trials = op.trials(definition, case)
    try:
        outputs = _outputs(definition, op, actor, case, trials)
    except Exception as error:  # noqa: BLE001 - a reference's own failure is the finding, told with its case
        yield f"{type(error).__name__}: {error}"
        return
    for name, spec in definition.outputs.items():
        entries = {key.partition("@")[2]: value for key, value in oracle.items() if key.partition("@")[0] == name}
        if name in floor:
            entries["floor"] = floor[name]
        shape = definition.shape_of(spec, case.axes)
        if trials and shape is not None:
            shape = (trials, *shape)
        expected = Expected(
            shape=shape,
            dtype=TORCH_DTYPES[spec.dtype],
            oracle=entries,
            comparison=op.comparisons(definition).get(name),
        )
        ruling = judge_output(outputs.get(name), expected, tolerance=None)
        if ruling.verdict is not Verdict.PASS:
            yield f"{name}: {ruling.message}"


def _outputs(
    definition: Definition, op: Op, actor: Reference, case: Case, trials: int
) -> Mapping[str, torch.Tensor]:
    import torch

    from traceproof.actors.base import named_outputs
    from traceproof.actors.inputs import make_inputs

    inputs = make_inputs(op, definition, case, device=torch.device("cpu"))
    torch.manual_seed(0)
    if not trials:
        return named_outputs(definition, actor.run(definition, op, inputs))
    draws = [named_outputs(definition, actor.run(definition, op, inputs)) for _ in range(trials)]
    return {name: torch.stack([draw[name] for draw in draws]) for name in definition.outputs}

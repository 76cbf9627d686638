"""One case, drawn and solved, and what the judge says of outputs.

Every feature that judges one case on the spot comes here: calibration, mutants, metamorphic relations,
extraction's check, generated tests. Whole definitions are the engine's (`traceproof.run.engine`).
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from traceproof.dataset.definition import Definition
from traceproof.judge.output import OTHER_TIES, Expected, Ruling, judge_output, with_open_rows
from traceproof.ops import answers, registry
from traceproof.ops.base import TORCH_DTYPES, Op
from traceproof.ops.cases import Case
from traceproof.ops.compare import of_reference
from traceproof.run.inputs import make_inputs

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject(answers.Subject):
    """One case, drawn and solved, and what the judge says of outputs."""

    def expected(self, name: str, *, reference: bool = False) -> Expected:
        """What the judge expects of an output, of a kernel or of the reference."""
        entries = entries_of(self.oracle, name)
        return expectation(self.definition, self.op, self.case, name, entries, reference=reference)

    def ruling(
        self, name: str, actual: torch.Tensor | None, tolerance: float | None = None, *, reference: bool = False
    ) -> Ruling:
        """The judge's ruling on an output of a kernel or of the reference."""
        return judge_output(actual, self.expected(name, reference=reference), tolerance=tolerance)


def solve(
    definition: Definition, case: Case, *, device: torch.device = CPU, dataset: Path | None = None, seed: int = 0
) -> Subject:
    """Draw a case's inputs and compute what is right; nothing where the op has no oracle for the definition."""
    op, unknown = registry.for_definition(definition)
    inputs = make_inputs(op, definition, case, device=device, dataset=dataset)
    oracle = {} if unknown is not None else op.answers(definition, inputs)
    kept = {name: value.cpu() for name, value in oracle.items()}
    return Subject(definition=definition, op=op, case=case, inputs=inputs, oracle=kept, seed=seed)


def solved(
    definition: Definition, sizes: tuple[str, ...], seed: int, *, ids: Collection[str] = ()
) -> Iterator[Subject]:
    """The cases of some sizes, edge and adversarial ones, each drawn and solved; with `ids`, these alone."""
    for case in registry.get(definition.op_type).of_form(definition).planned(definition, sizes=sizes, seed=seed):
        if not ids or case.id in ids:
            yield solve(definition, case, seed=seed)


def entries_of(oracle: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """The oracle's entries for an output, by what follows `@`."""
    found = ((key.partition("@"), value) for key, value in oracle.items())
    return {what: value for (output, _, what), value in found if output == name}


def expectation(  # noqa: PLR0913 - one output of one case
    definition: Definition,
    op: Op,
    case: Case,
    name: str,
    entries: Mapping[str, torch.Tensor],
    *,
    reference: bool = False,
    in_chunks: bool = False,
) -> Expected:
    """What the judge expects of an output of a case, given the oracle's entries for it.

    `reference`: it is the definition's reference that gave the output, which may lose less than a kernel.
    """
    spec = op.judged(definition)[name]
    trials = op.trials(definition, case)
    sizes = definition.shape_of(spec, case.axes)
    named = zip(spec.shape or (), sizes or (), strict=True)
    shape = (
        None if sizes is None else tuple(None if axis in definition.open_axes else size for axis, size in named)
    )
    kind = op.comparisons(definition).get(name)
    held = {what: value for what, value in entries.items() if what != OTHER_TIES}
    return Expected(
        shape=(trials, *shape) if trials and shape is not None else shape,
        dtype=TORCH_DTYPES.get(spec.dtype),
        oracle=held if reference else with_open_rows(entries),  # a reference orders as its shadow does
        comparison=of_reference(kind) if kind is not None and reference else kind,
        in_chunks=in_chunks,
        drawn=bool(trials),
    )

"""Put the references of a dataset to metamorphic relations, which need no ground truth (see `relations`)."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch

from mutate import each_definition, same_values
from relations.building import Experiment, Outputs, Relation
from relations.op_types import relations_of
from traceproof.dataset.definition import Definition
from traceproof.judge import gates
from traceproof.judge.gates import unit_roundoff
from traceproof.judge.output import Expected, judge_output
from traceproof.ops import registry
from traceproof.ops.base import TORCH_DTYPES, Tensors, Values
from traceproof.ops.cases import Case
from traceproof.ops.compare import IndexSet, Quantised, Samples
from traceproof.reasons import Verdict
from traceproof.run.case import SolvedCase, solve
from traceproof.run.untrusted import CallError, UntrustedSource, loaded
from traceproof.sandbox import Limits, Pool, Status

# References of experts compute in float32 from the stored values: two of their answers differ by an order of sums
# and one rounding of the output. The op's own limits are for kernels that requantise.
SAME_EXPERTS = Quantised(rms=0.005, slope=0.005, reason="an order of float32 sums, and bfloat16 outputs")
FALSE_ALARM = 1e-6  # of two samples from one distribution being taken for two


class Agreement(StrEnum):
    """How two sides agree."""

    BITWISE = "bitwise"
    ROUNDING = "within rounding"
    NONE = "broken"


def agree(
    subject: SolvedCase, name: str, left: torch.Tensor, right: torch.Tensor, room: torch.Tensor | None
) -> tuple[Agreement, str]:
    """How one output's two sides agree, and what to tell people.

    `room` is what a low-precision computation loses on both sides, elementwise; None where none is needed.
    """
    if same_values(left, right):
        return Agreement.BITWISE, ""
    comparison = subject.op.comparisons(subject.definition)[name]
    if isinstance(comparison, Samples):
        return _same_distribution(left, right)
    if isinstance(comparison, IndexSet):
        return _same_sets(subject, name, left, right)
    oracle = {"": right.to(torch.float64)}  # what both sides may lose is in the baseline's place, or the bound's
    oracle |= {} if room is None else {"baseline": oracle[""] + room, "bound": room}
    kind = SAME_EXPERTS if isinstance(comparison, Quantised) else comparison
    expected = Expected(shape=tuple(right.shape), dtype=right.dtype, oracle=oracle, comparison=kind)
    ruling = judge_output(left, expected, tolerance=None)
    return Agreement.ROUNDING if ruling.verdict == Verdict.PASS else Agreement.NONE, ruling.message


def room_for(sides: list[tuple[Tensors, Tensors]], name: str) -> torch.Tensor | None:
    """What the baseline loses against the oracle, |left| + |right|, the experiment done with each of the two."""
    (low_left, low_right), (exact_left, exact_right) = sides
    if name not in low_left or name not in exact_left:
        return None
    pairs = ((low_left, exact_left), (low_right, exact_right))
    lost = [(low[name].double() - exact[name].double()).abs() for low, exact in pairs]
    return torch.nan_to_num(lost[0]) + torch.nan_to_num(lost[1])


def _same_sets(subject: SolvedCase, name: str, left: torch.Tensor, right: torch.Tensor) -> tuple[Agreement, str]:
    """Rows of indices as sets; where they differ, both must be choices that rounding leaves open."""
    if left.shape == right.shape and torch.equal(left.sort(-1).values, right.sort(-1).values):
        return Agreement.BITWISE, "as sets"
    entries = {key.partition("@")[2]: value for key, value in subject.oracle.items()}
    padding = subject.op.comparisons(subject.definition)[name]
    assert isinstance(padding, IndexSet)
    if left.shape == right.shape and len(left) == len(entries["scores"]):
        found = [gates.index_set(side, entries, padding.padding) for side in (left, right)]
        if all(gate.ok for gate in found):
            return Agreement.ROUNDING, "sets differ among scores within rounding of the k-th best"
    return Agreement.NONE, "sets of indices differ"


def _same_distribution(left: torch.Tensor, right: torch.Tensor) -> tuple[Agreement, str]:
    """Two samples [trials, rows]: every token's frequency within what chance allows (Hoeffding, union bound)."""
    if left.shape != right.shape:
        return Agreement.NONE, f"shapes {list(left.shape)} and {list(right.shape)}"
    trials, rows = left.shape
    worst, tokens = 0.0, 0
    for row in range(rows):
        seen = torch.unique(torch.cat([left[:, row], right[:, row]]))
        tokens += len(seen)
        counts = [(side[:, row, None] == seen).sum(0) for side in (left, right)]
        worst = max(worst, float((counts[0] - counts[1]).abs().max()) / trials)
    limit = math.sqrt(2 * math.log(4 * max(tokens, 1) / FALSE_ALARM) / (2 * trials)) * math.sqrt(2)
    text = f"frequencies differ by up to {worst:.3g} in {trials} trials (limit {limit:.3g})"
    return Agreement.ROUNDING if worst <= limit else Agreement.NONE, text


# Edge cases hold empty rows, adversarial ones magnitudes; a case's relation costs up to four calls.
WANTED = ("small", "medium-0", "edge", "adversarial-rows", "adversarial-holes", "adversarial-boundary")

# Two samples are held against each other, which takes more draws than one against what is exact: so many, unless
# their inputs together have more elements than that.
DRAWS, ELEMENTS = 512, 1 << 21


def cases_of(definition: Definition, seed: int) -> list[Case]:
    """The cases that relations are tried on."""
    op = registry.get(definition.op_type).of_form(definition)
    found = op.cases(definition, sizes=("small", "medium"), seed=seed)
    return [case for case in found if case.size in WANTED or case.id in WANTED]


def try_relation(relation: Relation, subjects: list[SolvedCase], source: UntrustedSource) -> dict[str, Any]:
    """`holds`, `cases` that the relation says something about, and for the first that breaks it the evidence.

    Where the reference itself does not run on the case's own inputs, that case is left out and named.
    """
    found: dict[str, Any] = {"relation": relation.name, "cases": 0, "agreement": "", "failing": [], "evidence": ""}
    for subject in subjects:
        experiment = relation.design(subject)
        if experiment is None:
            continue
        try:
            original = _call(relation, subject, subject.inputs, source)
        except CallError as error:  # that it fails here is the judge's finding
            if error.reply.status is not Status.ERROR:
                raise
            found["failing"].append(f"{subject.case.id}: {error.told}")
            continue
        found["cases"] += 1
        agreement, evidence = _outcome(relation, subject, experiment, original, source)
        if agreement == Agreement.NONE or (relation.exact and agreement != Agreement.BITWISE):
            return found | {"agreement": str(Agreement.NONE), "evidence": f"{subject.case.id}: {evidence}"}
        if found["agreement"] != Agreement.ROUNDING:
            found["agreement"] = str(agreement)
    return found


def _call(relation: Relation, subject: SolvedCase, inputs: Values, source: UntrustedSource) -> Tensors:
    size = sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor))
    more = min(DRAWS, ELEMENTS // max(size, 1)) if subject.trials else 0
    trials = 1 if relation.once else max(subject.trials, more)
    return source.run(subject.case, inputs, seed=subject.seed, trials=trials).outputs


def _outcome(
    relation: Relation, subject: SolvedCase, experiment: Experiment, original: Tensors, source: UntrustedSource
) -> tuple[Agreement, str]:
    try:
        outputs = _run(experiment, original, lambda inputs: _call(relation, subject, inputs, source))
    except CallError as error:  # the relation's inputs are as good as the case's own
        if error.reply.status is not Status.ERROR:
            raise
        return Agreement.NONE, f"the reference fails on the changed inputs: {error.told}"
    left, right = experiment.sides(outputs)
    rooms = None if relation.exact else _rooms(subject, experiment)
    worst, evidence = Agreement.BITWISE, ""
    for name, value in right.items():
        room = room_for(rooms, name) if rooms else None
        if relation.exact and value.dtype.is_floating_point:
            agreement, text = _exactly(left[name], value)
        else:
            agreement, text = agree(subject, name, left[name], value, room)
        if agreement == Agreement.NONE:
            return agreement, f"{name}: {text}"
        if agreement == Agreement.ROUNDING:
            worst, evidence = agreement, f"{name}: {text}"
    return worst, evidence


def _exactly(left: torch.Tensor, right: torch.Tensor) -> tuple[Agreement, str]:
    if same_values(left, right):
        return Agreement.BITWISE, ""
    if left.shape != right.shape or left.dtype != right.dtype:
        return Agreement.NONE, f"{left.dtype} {list(left.shape)} and {right.dtype} {list(right.shape)}"
    differ = ~((left == right) | ((left != left) & (right != right)))  # noqa: PLR0124
    place = tuple(differ.nonzero()[0].tolist())
    count = f"{int(differ.sum())} of {left.numel()}"
    return Agreement.NONE, f"{count} elements differ, first at {list(place)}: {left[place]} and {right[place]}"


def _run(experiment: Experiment, original: Tensors, compute: Callable[[Values], Tensors]) -> Outputs:
    outputs = [original]
    for inputs in experiment.calls:
        outputs.append(compute(inputs(outputs) if callable(inputs) else inputs))
    return outputs


def _rooms(subject: SolvedCase, experiment: Experiment) -> list[tuple[Tensors, Tensors]] | None:
    """Both sides as the baseline has them, and as the oracle has them; None where there is no baseline."""
    op, definition = subject.op, subject.definition

    def exact(inputs: Values) -> Tensors:
        return {name: value for name, value in op.oracle(definition, inputs).items() if "@" not in name}

    def low(inputs: Values) -> Tensors:
        baseline = op.baseline(definition, inputs)
        return baseline or _bounded(definition, op.oracle(definition, inputs))

    if not op.baseline(definition, subject.inputs) and not any(name.endswith("@bound") for name in subject.oracle):
        return None
    return [experiment.sides(_run(experiment, compute(subject.inputs), compute)) for compute in (low, exact)]


def _bounded(definition: Definition, oracle: Tensors) -> Tensors:
    """A matrix product off by its whole bound and a rounding."""
    found = {}
    for name, spec in definition.outputs.items():
        rounding = unit_roundoff(TORCH_DTYPES[spec.dtype])
        found[name] = oracle[name] + oracle[f"{name}@bound"] + rounding * oracle[name].abs()
    return found


def measured(definition: Definition, pool: Pool, limits: Limits) -> dict[str, Any]:
    """What becomes of every relation of a definition, see `try_relation`; none where a case needs too much memory.

    A refusal, a crash, a hang or an out-of-memory breaks the relation at hand. `pool` has workers for untrusted
    code, see `traceproof.run.workers.untrusted_pool`.
    """
    op, cases = registry.get(definition.op_type).of_form(definition), cases_of(definition, seed=0)
    most = limits.memory_bytes or 0
    if any(op.memory(definition, case) > most for case in cases):
        return {"counts": {"too large": 1}}
    subjects = [solve(definition, case, seed=0) for case in cases]
    rows = []
    for relation in relations_of(definition):
        try:
            with loaded(definition, pool, limits=limits) as source:
                found = try_relation(relation, subjects, source)
        except CallError as error:
            text = f"{error.reply.status}: {error.reply.message[-300:]}"
            found = {"cases": 1, "agreement": str(Agreement.NONE), "evidence": text, "failing": []}
        rows.append({"relation": relation.name, **found})
    counts = Counter(row["agreement"] for row in rows if row["cases"])
    return {"definition": definition.name, "op_type": definition.op_type, "counts": counts, "relations": rows}


if __name__ == "__main__":
    sys.exit(bool(each_definition(__doc__, measured, out="relations", seconds=600.0)[Agreement.NONE]))

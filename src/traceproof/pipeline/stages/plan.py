"""Plan: which cases of which definitions will be run, one file per op_type."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import Broken, Entry, Tree, WorkloadLine, read_tree
from traceproof.digests import digest_json
from traceproof.ops import far, registry
from traceproof.ops.base import Op
from traceproof.ops.cases import WORKLOADS, Case
from traceproof.ops.twins import PREFIX, twin_of
from traceproof.pipeline.plan_facts import SUFFIX, PlanFacts
from traceproof.pipeline.records import (
    TWIN,
    BrokenFile,
    OpTypePlan,
    PlannedCase,
    PlannedDefinition,
    SkipNote,
    earlier,
)
from traceproof.pipeline.stages.hidden import hidden_cases
from traceproof.pipeline.stages.large import is_large
from traceproof.pipeline.stages.plan_earlier import EarlierPlan, placed
from traceproof.pipeline.stages.plan_inits import Inits
from traceproof.pipeline.stages.plan_selection import Selection, broken_of, check_cases, selected
from traceproof.pipeline.stages.plan_twins import PlannedTwin, noted, too_large
from traceproof.pipeline.stages.plan_workloads import blobs_of, fitting_lines, skip_of, workload_case
from traceproof.pipeline.stages.shards import Split
from traceproof.reasons import Skip
from traceproof.store import write_if_changed
from traceproof.text import printable
from traceproof.untrusted.bounded import bounded

PLAN_SECONDS = 60.0  # for the cases of one definition; a thousandth of that is usual
PLAN_BYTES = 4 << 30  # beside what the process has by then
UNDRAWN = "none"  # the case of a definition that no inputs can be drawn for


def plan(
    dataset: Path, out: Path, selection: Selection, inits: Inits | None = None, split: Split | None = None
) -> list[Path]:
    """Write `out/<op_type>.json` for each op_type selected; an unchanged file keeps its time, a stale one goes.

    Without `inits` no definition's own `init` is run, and inputs are drawn by role; without `split` each actor has
    one job per op_type. Raises TraceproofError: a selected name does not exist, or the dataset has no definitions.
    """
    return plan_tree(read_tree(dataset), out, selection, inits, split)


def plan_tree(  # noqa: PLR0913, PLR0917 - as `plan`
    tree: Tree,
    out: Path,
    selection: Selection,
    inits: Inits | None = None,
    split: Split | None = None,
    code: str = "",
) -> list[Path]:
    """Plan a dataset that was read; else as `plan`.

    `code` is the digest of what plans. What the same planned is not planned again: an op_type none of whose files
    has changed, and a definition that is as it was. Empty: all is planned.
    """
    groups = selected(tree, selection)
    slots = None if split is None else [split.slots, split.gpu]
    context = digest_json([code, selection.as_json(), slots, str(tree.root)]) if code else ""
    folder = earlier(out) if code else out
    paths = {op_type: folder / f"{op_type}.json" for op_type in sorted(groups)}
    before = {name: EarlierPlan.of(path, context, tree, groups[name], selection) for name, path in paths.items()}
    plans = [
        _op_type_plan(tree, name, groups[name], selection, before[name])
        for name in paths
        if not before[name].holds
    ]
    for planned in plans if inits is None else _with_inits(tree, plans, inits):
        one = before[planned.op_type]
        whole = one.split(planned) or (split.applied(planned) if split else planned)
        text = whole.as_text()
        PlanFacts.of(whole).write(one.path, text=text, context=one.context, made_of=one.made_of)
        write_if_changed(one.path, text)
    check_cases(selection, groups)
    for path in (*folder.glob("*.json"), *out.glob("*.json")):
        if path.stem not in paths:
            path.unlink(missing_ok=True)
            path.with_suffix(SUFFIX).unlink(missing_ok=True)
    return [placed(path, out) for path in paths.values()]


def _with_inits(tree: Tree, plans: Sequence[OpTypePlan], inits: Inits) -> Iterator[OpTypePlan]:
    """The plans, with the inputs that definitions' own `init`s make."""
    entries = {name: entry for plan in plans for name, entry in plan.definitions.items() if not entry.twin}
    filled = inits.filled((tree.definitions[name].definition, entry.cases) for name, entry in entries.items())
    known = {name: entries[name].holding(cases) for name, cases in zip(entries, filled, strict=True)}
    for plan in plans:
        mine = {name: known.get(name, entry) for name, entry in plan.definitions.items()}
        yield plan.model_copy(update={"definitions": mine})


def _op_type_plan(
    tree: Tree, op_type: str, names: Iterable[str], selection: Selection, before: EarlierPlan
) -> OpTypePlan:
    definitions: dict[str, PlannedDefinition] = {}
    broken = broken_of(tree, op_type, selection)
    for name in sorted(names):
        entry = tree.definitions[name]
        planned, twin = before.entries(entry) or _definition_plan(tree, entry, selection, broken)
        found = {name: planned, name + TWIN: twin}
        definitions |= {key: entry for key, entry in found.items() if entry is not None}
    told = tuple(BrokenFile(path=printable(item.path.as_posix()), message=item.message) for item in broken)
    return OpTypePlan(op_type=op_type, dataset=str(tree.root), definitions=definitions, broken=told)


def _definition_plan(
    tree: Tree, entry: Entry, selection: Selection, broken: list[Broken]
) -> tuple[PlannedDefinition | None, PlannedDefinition | None]:
    """The plans of one definition and its twin; None: it can not be planned, which `broken` says, or has none."""
    definition = entry.definition
    try:
        with bounded(seconds=PLAN_SECONDS, memory=PLAN_BYTES):
            op, unknown = registry.for_definition(definition)
            lines = fitting_lines(tree, definition, broken) if selection.workloads else []
            cases = _cases(definition, op, selection, lines, unknown=unknown is not None)
            twin = _twin(definition, op, selection) if unknown is None and too_large(cases) else None
    except Exception as error:  # noqa: BLE001 - sizes that an op can not compute with are this definition's error
        what = f"no cases can be planned: {type(error).__name__}: {str(error)[:300]}"
        broken.append(Broken(entry.path, what, "check its sizes, names and constraints"))
        return None, None
    if twin is not None:
        cases = [noted(case, twin) for case in cases]
    whole = _planned_definition(entry, definition, cases, selection)
    blobs = [planned.model_copy(update={"blobs": blobs_of(tree.root, planned)}) for planned in whole.cases]
    whole = whole.holding(blobs).model_copy(update={"no_oracle": unknown})
    if not isinstance(twin, PlannedTwin):
        return whole, None
    smaller = _planned_definition(entry, twin.definition, twin.cases, selection)
    return whole, smaller.model_copy(update={"twin": twin.told})


def _planned_definition(
    entry: Entry, definition: Definition, cases: Iterable[PlannedCase], selection: Selection
) -> PlannedDefinition:
    return PlannedDefinition(
        path=printable(entry.path.as_posix()),
        digest=definition.digest,
        no_oracle=None,
        nonce=selection.hidden_seed,
        definition=definition.as_json(),
        cases=tuple(_wanted(cases, selection.cases)),
    )


def _twin(definition: Definition, op: Op, selection: Selection) -> PlannedTwin | str:
    """The twin of a definition that does not fit, with its cases, or why there is none that does."""
    twin = twin_of(definition, op)
    if isinstance(twin, str):
        return twin
    small, _ = registry.for_definition(twin.definition)
    cases = _cases(twin.definition, small, selection, [], unknown=False, prefix=PREFIX)
    if too_large(cases):
        return f"with {twin} it does not fit either"
    return PlannedTwin(twin.definition, str(twin), cases)


def _cases(  # noqa: PLR0913 - what is planned, of what, and what it is called
    definition: Definition,
    op: Op,
    selection: Selection,
    lines: Iterable[WorkloadLine],
    *,
    unknown: bool,
    prefix: str = "",
) -> list[PlannedCase]:
    blocked = op.no_inputs(definition)
    if blocked is not None:
        return [_without_inputs(blocked, selection)]
    drawn = op.planned(definition, sizes=selection.sizes, seed=selection.seed)
    cases = [replace(case, id=prefix + case.id) for case in drawn]
    skips: dict[str, SkipNote | None] = {}
    for line in lines:
        case = workload_case(line, selection.seed)
        cases.append(case)
        skips[case.id] = skip_of(line)
    make = partial(_planned, definition, op, selection, unknown)
    planned = _mark_repeat([make(case, skips.get(case.id)) for case in cases])
    base = next((case for case, entry in zip(cases, planned, strict=True) if entry.repeat), None)
    if base is not None:
        hidden = hidden_cases(definition, base, selection.hidden_seed)
        options = f"--seed {base.seed} --hidden-seed {selection.hidden_seed}"
        planned += [make(case, None).model_copy(update={"hidden": options}) for case in hidden]
    selection.met.update(entry.id for entry in planned)
    return planned


def _wanted(planned: Iterable[PlannedCase], ids: Collection[str]) -> list[PlannedCase]:
    """The cases of these ids, hidden ones last; another is repeated where the one that was is not among them.

    Where there are no ids, all of them. What no inputs can be drawn for has no other case than one that says so.
    """
    if not ids:
        return list(planned)
    chosen = [entry for entry in planned if entry.id in {*ids, UNDRAWN}]
    shown = _mark_repeat([entry for entry in chosen if not entry.hidden])
    return [*shown, *(entry for entry in chosen if entry.hidden)]


def _without_inputs(why: str, selection: Selection) -> PlannedCase:
    """The only case of a definition that no inputs can be drawn for."""
    case = Case(UNDRAWN, "edge", {}, selection.seed)
    selection.met.add(case.id)
    note = SkipNote(reason=Skip.NO_INPUTS, message=why)
    return PlannedCase(case=case, digest=case.digest, memory=0, trials=0, skip=note, large=False, nonce=0)


def _planned(  # noqa: PLR0913, PLR0917 - all but the last two are bound
    definition: Definition,
    op: Op,
    selection: Selection,
    unknown: bool,  # noqa: FBT001 - bound, as said
    case: Case,
    skip: SkipNote | None,
) -> PlannedCase:
    """One case as the plan has it; `skip`: why it is not run, whatever its size."""
    need, (more, eager) = op.memory(definition, case), _far_bytes(definition, op, case)
    trials = op.trials(definition, case)
    return PlannedCase(
        case=case,
        digest=case.digest,
        memory=need,
        trials=trials,
        skip=skip or _too_large(need + more, selection.memory_limit),
        large=not unknown and is_large(definition, op, case),
        nonce=selection.hidden_seed if trials else 0,
        kernel_bytes=more,
        eager_bytes=eager,
        oracle_bytes=op.oracle_memory(definition, case),
    )


def _far_bytes(definition: Definition, op: Op, case: Case) -> tuple[int, int]:
    """Bytes that a kernel and PyTorch's form of one need for what they get in place of a small case's tensors."""
    enlarged = op.enlarged(definition) if far.SIZE in case.params else None
    if enlarged is None:
        return 0, 0
    return enlarged.bytes(definition, case), enlarged.eager_bytes(definition, case)


def _mark_repeat(planned: Sequence[PlannedCase]) -> list[PlannedCase]:
    """Mark the cheapest ordinary case: it is run again for determinism and for remembered answers."""
    ordinary = [entry for entry in planned if not entry.skip and entry.case.size not in {"edge", WORKLOADS}]
    chosen = min(ordinary, key=lambda entry: (entry.memory, entry.id), default=None)
    return [entry.model_copy(update={"repeat": entry is chosen}) for entry in planned]


def _too_large(need: int, limit: int) -> SkipNote | None:
    if need <= limit:
        return None
    told = f"needs about {need / 2**30:.1f} GiB, the limit (limits.memory_gb) is {limit / 2**30:.1f} GiB"
    return SkipNote(reason=Skip.DOES_NOT_FIT, message=told)

"""Plans which cases are run, a file per job: selected ones, scaled down if too large, workload lines."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import Field

from traceproof.dataset.definition import Definition, Dialect
from traceproof.dataset.tree import (
    Broken,
    DatasetEntry,
    DatasetTree,
    WorkloadLine,
    closest,
    group_of,
    paused_collection,
    read_tree,
    why,
)
from traceproof.digests import SOURCE, digest_file, digest_json, verdict_code
from traceproof.environments import jit
from traceproof.errors import TraceproofError
from traceproof.files import seal_of, write_if_changed, write_text
from traceproof.ops import far, registry
from traceproof.ops.cases import EDGE, LARGE_BYTES, WORKLOADS, Case
from traceproof.ops.op import Op
from traceproof.ops.scaled_down import PREFIX, scaled_down_of
from traceproof.programs import bounded
from traceproof.reasons import Skip, Unavailable
from traceproof.run import schema
from traceproof.run.hidden import hidden_cases
from traceproof.text import printable


class PlanSelection(schema.ClosedModel):
    """What to plan, out of config.yaml."""

    op_types: tuple[str, ...] = ()  # names; empty selects all
    definitions: tuple[str, ...] = ()  # names; empty selects all
    cases: tuple[str, ...] = ()  # case ids; empty selects all
    sizes: tuple[str, ...] = ("small", "medium")  # out of ops.cases.ALL_SIZES
    seed: int = 0  # every case's seed
    hidden_seed: int = 0  # seeds and sizes of hidden cases follow from it
    boundaries: bool = False  # whether `Op.boundaries` are cases too, as they are for kernels
    workloads: bool = False  # whether the dataset's own workload lines are cases too
    memory_limit: int = 14 << 30  # bytes; cases that need more become a typed skip
    met: set[str] = Field(default_factory=set, exclude=True)  # ids of cases met while planning, to check `cases`


def selected(tree: DatasetTree, selection: PlanSelection) -> dict[str, list[str]]:
    """Names of the definitions to plan, by op_type; raises as `plan` does."""
    groups: dict[str, list[str]] = {}
    for name, entry in tree.definitions.items():
        groups.setdefault(entry.definition.op_type, []).append(name)
    for broken in tree.broken:
        groups.setdefault(group_of(broken), [])  # a folder with only broken files still gets verdicts
    requested, known = set(selection.definitions), ", ".join(sorted(groups))
    absent = [(name, closest(name, groups)) for name in selection.op_types if name not in groups]
    problems = [f"op_type {name!r} has no definition; {near}; there are: {known}" for name, near in absent]
    unknown = (name for name in selection.definitions if name not in tree.definitions)
    problems += [f"definition_name {why(tree, name)}" for name in unknown]
    if problems:
        raise TraceproofError(f"the selection does not fit the dataset {tree.root}", problems=problems)
    groups = {name: groups[name] for name in selection.op_types or groups}
    if not requested:
        return groups
    by_op_type = {name: sorted(requested.intersection(members)) for name, members in groups.items()}
    if not any(by_op_type.values()):
        problems = [f"{name} is of {tree.definitions[name].definition.op_type}" for name in sorted(requested)]
        raise TraceproofError("no definition is of both the names and the op_types selected", problems=problems)
    return {name: members for name, members in by_op_type.items() if members}


def check_cases(selection: PlanSelection, groups: Mapping[str, list[str]]) -> None:
    """Check that every selected case exists. Raises TraceproofError: one does not."""
    if not any(groups.values()):
        return
    where = "is in none of the selected definitions"
    unknown = (name for name in selection.cases if name not in selection.met)
    problems = [f"case {name!r} {where}; {closest(name, selection.met)}" for name in unknown]
    if problems:
        todo = "Workload lines are cases with `workloads: true`, and sizes with --test-sizes."
        raise TraceproofError("the selection names cases that are not planned", problems=problems, todo=todo)


PLAN_SECONDS = 60.0  # for one definition's cases; a thousandth of it is usual
PLAN_BYTES = 4 << 30  # in addition to what the process uses by then
MIB = 1 << 20
# MiB of the host for a coordinator and the process from which workers are forked, each with torch, on a GPU with
# CUDA's libraries
BASE_MB, GPU_BASE_MB = 2000, 4000
PROCESS_MB = 600  # MiB of the host per further definition's processes, and of a GPU per process that has it open
STACK_MB = 1000  # MiB of the host per process that has imported a ground truth's package
GPU_MB = 1000  # MiB of a GPU: workspaces of libraries, and memory kept between cases
SLACK = 1.25  # estimates were up to a fifth too low
FEW_PARALLEL = 2  # definitions at the same time, where there are fewer than MANY
MANY = 12
DRAWING_PARALLEL = 12  # the same of samplers, whose references make thousands of short calls and use little memory
# Rough estimates in seconds, from benchmarks on two cores and on an H200 that 16 processes share.
CASE_SECONDS = 0.03
TRIAL_SECONDS = 0.015
CPU_BYTE_SECONDS, GPU_BYTE_SECONDS = 1.5e-9, 3e-10
BESIDE_SECONDS = 2.0  # of a sampler's scaled-down form; an idle core draws 40,000 times from 500 tokens
UNDRAWN = "none"  # id of the case of a definition whose inputs can not be drawn


def plan(dataset: Path, out: Path, selection: PlanSelection, *, code: str = "", gpu: bool = False) -> schema.Index:
    """Write `out/<op_type>.json` for each job of the selected op_types, then `out/index.json`; returns the index.

    An unchanged file keeps its date; one of no job any more goes, with its verdicts. `code`: digest of planning
    code; definitions planned before for the same selection are not planned again (empty: all are). `gpu`: whether
    there is one. Raises TraceproofError: a selected name does not exist, or there are no definitions.
    """
    with paused_collection(kept=True):  # a job ends with it
        tree = read_tree(dataset, naming=() if selection.op_types else selection.definitions)
        groups = selected(tree, selection)
        definitions = (tree.definitions[name].definition for names in groups.values() for name in names)
        kinds = {(registry.file_of(one.op_type), one.dialect is Dialect.PUBLISHED) for one in definitions}
        if any(not published or (file and SOURCE not in file.parents) for file, published in kinds):
            import torch  # noqa: F401 - to see its dtypes, or for other packages' ops; more than planning may take
        # A selection of cases is planned each time, since planning also checks it.
        common = [code, selection.model_dump(), str(tree.root)] if code and not selection.cases else []
        plans = []
        for name in sorted(groups):
            context = digest_json([*common, verdict_code(registry.file_of(name))]) if common else ""
            earlier: dict[Path, schema.OpTypePlan] = {}
            for path in schema.files_of(out, name) if context else ():
                with suppress(TraceproofError):  # damaged
                    earlier[path] = schema.OpTypePlan.read(path)
            plans.append((_op_type_plan(tree, name, groups[name], selection, context, earlier), earlier))
        check_cases(selection, groups)
        listed: dict[str, schema.Listed] = {}
        stale = {*out.glob("*.json"), *out.parent.glob("verdicts/*.jsonl")}
        for planned, earlier in plans:
            digests = {}
            for name, job in planned.jobs.items():
                path = out / f"{name}.json"
                stale -= {path, out.parent / "verdicts" / f"{name}.jsonl"}
                if earlier.get(path) != job:
                    write_if_changed(path, job.as_text())
                digests[name] = seal_of(path)
            listed[planned.op_type] = _listed(planned, digests, gpu=gpu)
        for path in stale:
            path.unlink(missing_ok=True)
        index = schema.Index(dataset=str(tree.root), op_types=listed)
        write_text(out / schema.INDEX, index.as_text())
        return index


def _listed(planned: schema.OpTypePlan, digests: dict[str, str], *, gpu: bool) -> schema.Listed:
    """The index entry of a plan: the digests of its jobs, and what they need."""
    cases = [case for entry in planned.definitions.values() for case in entry.cases if case.skip is None]
    op = registry.get(planned.op_type)
    # On a GPU several definitions at a time: Python that launches small kernels leaves most of it idle.
    sampler, many = any(case.trials for case in cases), len(planned.definitions) >= MANY
    most = DRAWING_PARALLEL if sampler else schema.PARALLEL if op.slow or many else FEW_PARALLEL
    if not gpu:  # a sampler's reference takes longest of all there
        most = FEW_PARALLEL if sampler else 1
    parallel = max(1, min(most, len(planned.definitions)))
    to_run = ([case for case in entry.cases if case.skip is None] for entry in planned.definitions.values())
    needs = (max((one.memory + one.oracle_bytes + one.kernel_bytes for one in mine), default=0) for mine in to_run)
    largest = int(SLACK * sum(sorted(needs)[-parallel:]) / MIB)
    truths = schema.for_op_type(planned.op_type)
    stacks = len({schema.environment_of(name) for name in truths}) * schema.workers_of(parallel)  # processes
    call_seconds = CASE_SECONDS * (len(truths) if gpu else 1)
    byte_seconds = GPU_BYTE_SECONDS if gpu else CPU_BYTE_SECONDS
    seconds = sum(call_seconds + TRIAL_SECONDS * case.trials + byte_seconds * case.memory for case in cases)
    if not gpu:  # draws that twelve definitions make at the same time
        seconds += sum(case.further.seconds for case in cases if case.further is not None)
    builds = jit.longest(truths, (entry.parsed for entry in planned.definitions.values())) if gpu else 0.0
    host = GPU_BASE_MB + stacks * STACK_MB + largest // parallel if gpu else BASE_MB + largest
    return schema.Listed(
        digests=digests,
        mem_mb=host + parallel * PROCESS_MB,
        gpu_mb=GPU_MB + (1 + stacks + parallel) * PROCESS_MB + largest if gpu and cases else 0,
        parallel=parallel,
        builds=builds,
        seconds=seconds / max(1, -(-len(planned.definitions) // schema.GROUP)),
    )


def _op_type_plan(  # noqa: PLR0913, PLR0917 - as `plan`
    tree: DatasetTree,
    op_type: str,
    names: Iterable[str],
    selection: PlanSelection,
    context: str,
    earlier: Mapping[Path, schema.OpTypePlan],
) -> schema.OpTypePlan:
    definitions: dict[str, schema.PlannedDefinition] = {}
    # Files that can not be used get verdicts, unless definitions are selected by name.
    broken = [item for item in tree.broken if group_of(item) == op_type and not selection.definitions]
    same_code = (job.definitions.items() for job in earlier.values() if job.context == context)
    before = dict(chain.from_iterable(same_code))
    for name in sorted(names):
        entry, old_entry = tree.definitions[name], before.get(name)
        if old_entry is not None and _unchanged(tree, entry, old_entry, selection):
            definitions |= {key: before[key] for key in (name, name + schema.SCALED_DOWN) if key in before}
        else:
            definitions |= _definition_plan(tree, entry, selection, broken)
    files = tuple(schema.BrokenFile(path=printable(item.path.as_posix()), message=item.message) for item in broken)
    root = str(tree.root)
    return schema.OpTypePlan(op_type=op_type, dataset=root, context=context, definitions=definitions, broken=files)


def _unchanged(
    tree: DatasetTree, entry: DatasetEntry, earlier: schema.PlannedDefinition, selection: PlanSelection
) -> bool:
    """Whether a definition and its path are as they were when planned, and no workload file adds cases."""
    definition, same_path = entry.definition, earlier.path == printable(entry.path.as_posix())
    if not same_path or (selection.workloads and definition.name in tree.workload_files):
        return False
    return json.dumps(earlier.definition) == json.dumps(definition.as_json())  # in text, inputs have an order


def _definition_plan(
    tree: DatasetTree, entry: DatasetEntry, selection: PlanSelection, broken: list[Broken]
) -> dict[str, schema.PlannedDefinition]:
    """The plans of a definition and of its scaled-down form, by name; empty: `broken` gets the reason.

    Where none but edge cases fit, it is judged scaled down: its own cases are not run, edge cases neither, which
    alone would prove nothing, and say what becomes of the definition.
    """
    definition, path = entry.definition, printable(entry.path.as_posix())
    smaller: schema.PlannedDefinition | None = None
    try:
        with bounded(seconds=PLAN_SECONDS, memory=PLAN_BYTES):
            op, unknown = registry.for_definition(definition)
            lines = fitting_lines(tree, definition, broken) if selection.workloads else []
            cases = _cases(definition, op, selection, lines, unknown=unknown is not None)
            if unknown is None and _too_large(cases):
                smaller, note = _scaled_down(definition, op, selection, path)
                cases = [_noted(case, note) for case in cases]
            elif unknown is None and (ids := op.scaled_down_cases(definition)):
                smaller, _ = _scaled_down(definition, op, selection, path, beside=ids)
    except Exception as error:  # noqa: BLE001 - sizes that an op can not compute with
        message = f"no cases can be planned: {type(error).__name__}: {str(error)[:300]}"
        broken.append(Broken(entry.path, message, "check its sizes, names and constraints"))
        return {}
    chosen = _wanted(cases, selection.cases)
    for place, case in enumerate(chosen):
        if case.case.size == WORKLOADS and case.skip is None:  # its inputs are loaded from files
            values = case.case.params["inputs"].values()
            paths = sorted({value["path"] for value in values if value["type"] == "safetensors"})
            chosen[place] = case.model_copy(update={"blobs": {one: digest_file(tree.root / one) for one in paths}})
    full_size = schema.PlannedDefinition.alone(definition, chosen, unknown, selection.hidden_seed)
    plans = {definition.name: full_size.model_copy(update={"path": path})}
    return plans if smaller is None else {**plans, definition.name + schema.SCALED_DOWN: smaller}


def planned_alone(
    definition: Definition, selection: PlanSelection, lines: Iterable[WorkloadLine] = ()
) -> schema.PlannedDefinition:
    """The plan of one definition, with the cases of its workload lines; raises as `plan` does."""
    op, unknown = registry.for_definition(definition)
    cases = _cases(definition, op, selection, lines, unknown=unknown is not None)
    check_cases(selection, {definition.op_type: [definition.name]})
    chosen = _wanted(cases, selection.cases)
    return schema.PlannedDefinition.alone(definition, chosen, unknown, selection.hidden_seed)


def _scaled_down(
    definition: Definition, op: Op, selection: PlanSelection, path: str, *, beside: Collection[str] = ()
) -> tuple[schema.PlannedDefinition | None, str]:
    """The plan of a definition's scaled-down form, or None; and a sentence on what becomes of the definition.

    `beside`: ids of the only cases, by which its reference is judged beside those of its own size.
    """
    scaled = scaled_down_of(definition, op)
    if isinstance(scaled, str) or (beside and scaled.renumbered):
        return None, f"no scaled-down definition: {scaled}"
    scaled_op, _ = registry.for_definition(scaled.definition)
    copy = selection.model_copy(update={"met": set()})
    cases = _cases(scaled.definition, scaled_op, copy, [], unknown=False, prefix=PREFIX)
    if beside:
        cases = [case for case in cases if case.id.removeprefix(PREFIX) in beside]
        for place, case in enumerate(cases):  # as a hidden case, which the reference alone is run on
            further = case.further and replace(case.further, seconds=BESIDE_SECONDS)
            cases[place] = case.model_copy(update={"hidden": f"--seed {case.case.seed}", "further": further})
    selection.met.update(case.id for case in cases)
    if _too_large(cases):
        return None, f"no scaled-down definition: with {scaled} it does not fit either"
    chosen = _wanted(cases, selection.cases)
    if not chosen:
        return None, "its scaled-down definition has no such case"
    planned = schema.PlannedDefinition.alone(scaled.definition, chosen, None, selection.hidden_seed)
    fields = {"path": path, "scaled_down": str(scaled), "renumbered": scaled.renumbered}
    return planned.model_copy(update=fields), f"judged by a scaled-down definition: {scaled}"


def _too_large(cases: Sequence[schema.PlannedCase]) -> bool:
    """Whether some cases do not fit, and none but edge cases, which may be empty, is run."""
    reasons = [case.skip and case.skip.reason for case in cases if case.case.size != EDGE]
    return None not in reasons and Skip.DOES_NOT_FIT in reasons


def _noted(case: schema.PlannedCase, becomes: str) -> schema.PlannedCase:
    """A case of a definition that does not fit, as a skip that says what becomes of the definition."""
    if case.skip is not None and case.skip.reason != Skip.DOES_NOT_FIT:
        return case
    why = "the definition's ordinary cases do not fit" if case.skip is None else case.skip.message
    note = Unavailable(Skip.DOES_NOT_FIT, f"{why}; {becomes}")
    return case.model_copy(update={"skip": note})


def _cases(  # noqa: PLR0913 - what is planned, of what, and what it is called
    definition: Definition,
    op: Op,
    selection: PlanSelection,
    lines: Iterable[WorkloadLine],
    *,
    unknown: bool,
    prefix: str = "",
) -> list[schema.PlannedCase]:
    """All cases of a definition, hidden ones last."""
    no_inputs = op.no_inputs(definition)
    if no_inputs is not None:
        case = Case(UNDRAWN, "edge", {}, selection.seed)
        selection.met.add(case.id)
        no_fields: dict[str, Any] = {"memory": 0, "trials": 0, "large": False, "nonce": 0}
        note = Unavailable(Skip.NO_INPUTS, no_inputs)
        return [schema.PlannedCase(case=case, digest=case.digest, skip=note, **no_fields)]

    excess, in_chunks = op.reference_excess(definition), not unknown and op.in_chunks(definition)

    def planned_case(case: Case, skip: Unavailable | None = None, hidden: str = "") -> schema.PlannedCase:
        """One case as the plan has it; `skip`: why it is not run, if not for its size."""
        needed, trials = op.memory(definition, case), op.trials(definition, case)
        # kernels get large tensors in place of the small case's
        enlarged = op.enlarged(definition) if far.SIZE in case.params else None
        extra = enlarged.bytes(definition, case) if enlarged else 0
        if skip is None and needed + extra > selection.memory_limit:
            limit = f"the limit (limits.memory_gb) is {selection.memory_limit / 2**30:.1f} GiB"
            skip = Unavailable(Skip.DOES_NOT_FIT, f"needs about {(needed + extra) / 2**30:.1f} GiB, {limit}")
        return schema.PlannedCase(
            case=case,
            digest=case.digest,
            memory=needed,
            trials=trials,
            skip=skip,
            large=needed >= LARGE_BYTES and in_chunks and definition.output_elements(case.axes) > 0,
            nonce=selection.hidden_seed if trials else 0,
            kernel_bytes=extra,
            oracle_bytes=needed - excess,
            further=None if hidden else op.further(definition, case),
            hidden=hidden,
        )

    drawn = [*op.planned(definition, sizes=selection.sizes, seed=selection.seed)]
    drawn += op.boundaries(definition, seed=selection.seed) if selection.boundaries and not unknown else ()
    planned = [planned_case(replace(one, id=prefix + one.id)) for one in drawn if op.fits(definition, one)]
    for line in lines:
        workload, skip = line.trace.workload, None
        if line.missing:
            missing = f"{line.path}:{line.line}: no {line.missing[0]} in the dataset"
            skip = Unavailable(Skip.BLOB_MISSING, missing)
        inputs = {name: data.model_dump(mode="json") for name, data in workload.inputs.items()}
        name, axes = f"workload-{workload.uuid}", dict(workload.axes)
        planned.append(planned_case(Case(name, WORKLOADS, axes, selection.seed, {"inputs": inputs}), skip))
    planned = _mark_repeat(planned)
    base = next((entry.case for entry in planned if entry.repeat), None)
    if base is not None:
        options = f"--seed {base.seed} --hidden-seed {selection.hidden_seed}"
        cases = hidden_cases(definition, op, base, selection.hidden_seed)
        hidden = (planned_case(case, hidden=options) for case in cases if op.fits(definition, case))
        planned += [entry for entry in hidden if entry.skip is None]  # hidden sizes that do not fit are left out
    selection.met.update(entry.id for entry in planned)
    return planned


def _wanted(planned: Iterable[schema.PlannedCase], ids: Collection[str]) -> list[schema.PlannedCase]:
    """The cases with these ids, hidden ones last, one of them marked to be repeated; without ids, all cases.

    The case that says that no inputs can be drawn is always among them.
    """
    if not ids:
        return list(planned)
    chosen = [entry for entry in planned if entry.id in {*ids, UNDRAWN}]
    shown = _mark_repeat([entry for entry in chosen if not entry.hidden])
    return [*shown, *(entry for entry in chosen if entry.hidden)]


def _mark_repeat(planned: Sequence[schema.PlannedCase]) -> list[schema.PlannedCase]:
    """The cases, with the cheapest ordinary one marked: it is run twice, for determinism and cached answers."""
    ordinary = [entry for entry in planned if not entry.skip and entry.case.size not in {"edge", WORKLOADS}]
    chosen = min(ordinary, key=lambda entry: (entry.memory, entry.id), default=None)
    marked = ((entry, entry is chosen) for entry in planned)
    return [one if one.repeat is mark else one.model_copy(update={"repeat": mark}) for one, mark in marked]


def fitting_lines(tree: DatasetTree, definition: Definition, broken: list[Broken]) -> list[WorkloadLine]:
    """The definition's workload lines that have all its axes and inputs; the others are added to `broken`."""
    fitting, optional = [], {name for name, spec in definition.inputs.items() if spec.optional}
    for line in tree.workloads(definition.name).lines:
        workload = line.trace.workload
        axes = sorted(set(definition.var_axes) - workload.axes.keys() - optional)
        inputs = sorted(definition.inputs.keys() - workload.inputs.keys() - optional)
        missing = f"axes {', '.join(axes)}" if axes else f"inputs {', '.join(inputs)}" if inputs else ""
        if missing:
            message = f"the line has no {missing}, which the definition has"
            broken.append(Broken(line.path, message, "mend the line, or remove it", line=line.line))
        else:
            fitting.append(line)
    return fitting

"""The cases that a solution is judged on."""

from pathlib import Path

from traceproof.dataset.definition import Definition
from traceproof.run.plan import Selection, plan
from traceproof.run.records import OpTypePlan, PlannedCase
from traceproof.solutions.records import Settings


def planned(name: str, settings: Settings, scratch: Path) -> tuple[Definition, list[PlannedCase]]:
    """A definition and its cases: those that anybody can compute, and as many of a seed that nobody knew."""
    found: dict[tuple[str, int], PlannedCase] = {}
    for hidden in (False, True):
        out = scratch / f"cases-{hidden}"
        [op_type] = plan(Path(settings.dataset), out, _selection(name, settings, hidden=hidden)).op_types
        entry = OpTypePlan.read(out / f"{op_type}.json").definitions[name]
        found |= {(case.id, case.case.seed): case for case in entry.cases}
    return entry.parsed, list(found.values())


def _selection(name: str, settings: Settings, *, hidden: bool) -> Selection:
    """What is planned: all cases by the public seed, or by the hidden one."""
    return Selection(
        definitions=(name,),
        sizes=settings.sizes,
        seed=settings.hidden_seed if hidden else settings.seed,
        hidden_seed=settings.hidden_seed,
        workloads=not hidden,
        memory_limit=settings.memory_limit,
    )

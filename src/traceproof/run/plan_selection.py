"""What of a dataset is planned."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from traceproof.dataset.tree import Broken, Tree, closest, group_of, why
from traceproof.errors import TraceproofError


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What to plan."""

    # op_types, definitions: names; empty selects all
    op_types: tuple[str, ...] = ()
    definitions: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()  # case ids; empty selects all
    sizes: tuple[str, ...] = ("small", "medium")  # names out of ops.cases.ALL_SIZES
    seed: int = 0  # every case's seed
    hidden_seed: int = 0  # what the hidden cases' seeds and sizes follow from
    workloads: bool = False  # whether the dataset's own workload lines are cases too
    memory_limit: int = 14 << 30  # bytes; a case whose estimate is above it becomes a typed skip
    met: set[str] = field(default_factory=set)  # case ids of the selected definitions, noted while planning

    def as_json(self) -> dict[str, Any]:
        """What it selects, as a JSON object."""
        return {name: value for name, value in asdict(self).items() if name != "met"}

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> Self:
        """The selection that `as_json` or the rules wrote."""
        fields: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in value.items()}
        return cls(**fields)


def selected(tree: Tree, selection: Selection) -> dict[str, list[str]]:
    """Names of the definitions that are planned, by op_type; raises as `plan` does."""
    groups: dict[str, list[str]] = {}
    for name, entry in tree.definitions.items():
        groups.setdefault(entry.definition.op_type, []).append(name)
    for broken in tree.broken:
        groups.setdefault(group_of(broken), [])  # a folder of broken files still gets its verdicts
    _check_names(tree, selection, groups)
    if selection.op_types:
        groups = {name: groups[name] for name in selection.op_types}
    return _named(tree, selection.definitions, groups) if selection.definitions else groups


def _check_names(tree: Tree, selection: Selection, groups: Mapping[str, list[str]]) -> None:
    problems = [
        f"op_type {name!r} has no definition; {closest(name, groups)}; there are: {', '.join(sorted(groups))}"
        for name in selection.op_types
        if name not in groups
    ]
    problems += [
        f"definition_name {why(tree, name)}" for name in selection.definitions if name not in tree.definitions
    ]
    if problems:
        raise TraceproofError(f"the selection does not fit the dataset {tree.root}", problems=problems)


def _named(tree: Tree, names: Iterable[str], groups: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """What of the groups has these names."""
    wanted = set(names)
    found = {op_type: sorted(wanted & set(members)) for op_type, members in groups.items()}
    found = {op_type: members for op_type, members in found.items() if members}
    if not found:
        problems = [f"{name} is of {tree.definitions[name].definition.op_type}" for name in sorted(wanted)]
        raise TraceproofError("no definition is of both the names and the op_types selected", problems=problems)
    return found


def check_cases(selection: Selection, groups: Mapping[str, list[str]]) -> None:
    """Check that every case selected was met while planning. Raises TraceproofError: one was not."""
    if not any(groups.values()):
        return
    unknown = [name for name in selection.cases if name not in selection.met]
    problems = [
        f"case {name!r} is in none of the selected definitions; {closest(name, selection.met)}" for name in unknown
    ]
    if problems:
        todo = "Workload lines are cases with `workloads: true`, and sizes with --test-sizes."
        raise TraceproofError("the selection names cases that are not planned", problems=problems, todo=todo)


def broken_of(tree: Tree, op_type: str, selection: Selection) -> list[Broken]:
    """An op_type's files that can not be used; none where definitions are selected by name."""
    return [item for item in tree.broken if group_of(item) == op_type and not selection.definitions]

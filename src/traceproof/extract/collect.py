"""What several models need, each kernel once, and what each of them asked for it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from traceproof.dataset.definition import Definition
from traceproof.models.catalogue import Parallel
from traceproof.ops.drafts import Draft


@dataclass(frozen=True, slots=True)
class Use:
    """Who makes a kernel call: the model, its `model:` tags, at which parallelism, where and how often."""

    model: str
    tags: tuple[str, ...]
    parallel: Parallel
    paths: tuple[str, ...]
    count: int


@dataclass(slots=True)
class Wanted:
    """A definition that models want."""

    name: str  # the draft's, with a version suffix where another kernel has that name
    draft: Draft  # what it says
    uses: list[Use] = field(default_factory=list)  # all calls of it

    def definition(self) -> Definition:
        """The definition with the tags of all its uses."""
        models = tuple(dict.fromkeys(tag for use in self.uses for tag in use.tags))
        parallels = sorted({use.parallel for use in self.uses})
        tags: dict[str, None] = {}
        for at in parallels:
            tags |= dict.fromkeys(self.draft.tags(models, tp=at.tp, ep=at.ep, dp=at.dp))
        made = self.draft.definition(list(tags))
        return made.model_copy(update={"name": self.name}) if self.name != made.name else made


@dataclass(frozen=True, slots=True)
class Clash:
    """Two kernels of one name that mean different things; the second was renamed."""

    name: str
    renamed: str
    models: tuple[str, ...]
    differences: tuple[str, ...]


def collect(asked: Iterable[tuple[Draft, Use]]) -> tuple[list[Wanted], list[Clash]]:
    """Each kernel once, in order of first use; one name with two meanings becomes two, the second `_v2`."""
    from traceproof.extract.compare import meaning_differences

    found: dict[str, Wanted] = {}
    clashes: dict[str, Clash] = {}
    for draft, use in asked:
        base = draft.definition([])
        version = 1
        while True:
            name = draft.name if version == 1 else f"{draft.name}_v{version}"
            held = found.get(name)
            if held is None:
                found[name] = Wanted(name, draft, [use])
                break
            differences = meaning_differences(held.draft.definition([]), base)
            if not differences:
                held.uses.append(use)
                break
            version += 1
            renamed = f"{draft.name}_v{version}"
            models = tuple(dict.fromkeys([*(used.model for used in held.uses), use.model]))
            clashes.setdefault(renamed, Clash(draft.name, renamed, models, tuple(differences)))
    return list(found.values()), list(clashes.values())

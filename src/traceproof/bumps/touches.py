"""For each (op_type, stack): the files its ground truth depends on, and the digest that keys its outputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from traceproof.bumps.package import Sources
from traceproof.bumps.reach import Reach
from traceproof.bumps.roots import roots
from traceproof.bumps.units import EFFECTS, FileUnits
from traceproof.checkouts.tree import Tree
from traceproof.dataset.files import deep_recursion, paused_collection
from traceproof.digests import digest_bytes, digest_json
from traceproof.pipeline.adapters import op_types
from traceproof.stacks import PACKAGES

DEEP = 20_000  # stack frames: imports are followed as deep as a package nests them


@dataclass(frozen=True)
class Touch:
    """What one op_type's ground truth depends on in one tree."""

    # stack, op_type: of what
    stack: str
    op_type: str
    reach: Reach  # all that was found

    @cached_property
    def parts(self) -> Mapping[str, str]:
        """Digest by part: `file::unit` of Python, `file` of anything else, and what widened the set."""
        with deep_recursion(DEEP):
            return self._parts()

    def _parts(self) -> Mapping[str, str]:
        sources = self.reach.sources
        if self.reach.widened:
            return sources.everything
        found: dict[str, str] = {}
        for path, name in self.reach.units:
            unit = sources.file(path).units[name]
            if unit.nodes:
                found[f"{path}::{name or '<import>'}"] = unit.digest()
        for path in self.reach.files:
            if path.endswith(".py"):
                error = sources.file(path).error
                if error is not None:
                    found[path] = error
            else:
                found[path] = digest_bytes(sources.tree.read([path])[path])
        return found

    @property
    def files(self) -> Mapping[str, str]:
        """Every file of the set, and why it is in it."""
        if self.reach.widened:
            return {
                name: self.reach.files.get(name, self.reach.widened[0]) for name in self.reach.sources.tree.files
            }
        return self.reach.files

    @cached_property
    def digest(self) -> str:
        """Digest of all that it depends on here; a part that moves to another file changes it."""
        return digest_json(dict(sorted(self.parts.items())))

    def why(self, path: str) -> list[str]:
        """The chain from a file up to the adapter, a line a step."""
        steps = []
        seen = set()
        while path in self.files and path not in seen:
            seen.add(path)
            reason = self.files[path]
            steps.append(f"{path}: {reason}")
            words = [word.rpartition(":")[0] or word for word in reason.split()]
            path = next((word for word in (*words, *reason.split()) if word in self.files), "")
        return steps


def touch(stack: str, op_type: str, sources: Sources) -> Touch:
    """What one op_type's ground truth depends on."""
    with deep_recursion(DEEP):
        return Touch(stack, op_type, Reach.of(sources, roots(stack, op_type)))


def touches(stack: str, tree: Tree, parsed: dict[str, FileUnits] | None = None) -> dict[str, Touch]:
    """The same for every op_type that the stack has adapters for; `parsed` keeps files for other commits."""
    sources = Sources(tree, PACKAGES[stack], parsed)
    with paused_collection(kept=True):
        return {op_type: touch(stack, op_type, sources) for op_type in op_types(stack)}


def stack_of(tree: Tree) -> str | None:
    """The stack whose package a tree holds; None: it is none of theirs."""
    for stack, package in PACKAGES.items():
        for folder in ("", "src/", "python/"):
            if f"{folder}{package}/__init__.py" in tree.files:
                return stack
    return None


def changed_parts(before: Touch, after: Touch) -> list[str]:
    """Parts that differ, are new or have vanished."""
    old, new = before.parts, after.parts
    return sorted(part for part in {**old, **new} if old.get(part) != new.get(part))


__all__ = ["EFFECTS", "Touch", "changed_parts", "stack_of", "touch", "touches"]

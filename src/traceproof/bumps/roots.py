"""What an op_type's adapter calls in its stack's package: read off the adapters' source, nothing is imported.

So it works where the package, or torch, is absent.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache

from traceproof import codedigest
from traceproof.ops.registry import ground_truth, known
from traceproof.stacks import STACKS, truths_of

BASE = "traceproof.ops.adapter"
PLACE = re.compile(r"[\w.]+:\w+")
CALLS = ".ground_truths."  # in the name of a module that calls a package
OTHER = "other"  # the name of the record for op_types that a stack has no adapter for


@dataclass(frozen=True, slots=True, kw_only=True)
class Roots:
    """Where following begins.

    Attributes:
        apis: `module:attribute`; one that does not exist at a version is no root there.
        modules: modules that the adapter imports by name, whatever it takes out of them.
        attributes: every attribute name in the adapter's code, since it calls methods of what it got.
    """

    apis: frozenset[str]
    modules: frozenset[str]
    attributes: frozenset[str]


def op_types(stack: str) -> list[str]:
    """The op_types that a ground truth of a stack has adapters for."""
    return [op_type for op_type in known() if adapter_modules(stack, op_type)]


def adapter_modules(stack: str, op_type: str) -> list[str]:
    """The modules that hold a stack's adapters for an op_type, one per ground truth."""
    found = (ground_truth(op_type, truth) for truth in truths_of(stack))
    return [module for module in found if module is not None]


def compiles(truth: str, op_type: str) -> bool:
    """Whether a ground truth's adapters for an op_type name kernel modules to compile ahead."""
    own = ground_truth(op_type, truth)
    reached = codedigest.closure(*([own] if own else []))
    used = (name for name in reached if name.endswith(f".{truth}") and not name.startswith("traceproof.stacks."))
    return any(b"modules=" in codedigest._file(module).read_bytes() for module in used)  # noqa: SLF001 - as below


@cache
def roots(stack: str, op_type: str) -> Roots:
    """What the adapters of an op_type call. Keys may be put together at run time, so all of a module count."""
    table = STACKS[stack].apis
    own = f"traceproof.stacks.{stack}"
    start = {name for name in codedigest.closure(own) if name.startswith(f"{own}.")}
    texts = set(STACKS[stack].modules)
    attributes: set[str] = set()
    reached = codedigest.closure(*adapter_modules(stack, op_type), BASE)
    for module in reached | start:
        if not module.startswith("traceproof.ops") and module not in start:
            continue
        path = codedigest._file(module)  # noqa: SLF001 - the one place that knows where modules lie
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
        if module in reached:
            attributes |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        if module in start or module == BASE or CALLS in module:
            texts |= {
                node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
    apis = {place for key in texts & table.keys() for place in table[key]}
    apis |= {text for text in texts if PLACE.fullmatch(text) and not text.startswith("traceproof.")}
    modules = {place.partition(":")[0] for place in apis}
    apis |= {place for places in table.values() for place in places if place.partition(":")[0] in modules}
    package = STACKS[stack].package
    named = {text for text in texts if text.startswith(f"{package}.") and text.replace(".", "").isidentifier()}
    return Roots(apis=frozenset(apis), modules=frozenset(named), attributes=frozenset(attributes))

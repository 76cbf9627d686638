"""What an op_type's adapter calls in its stack's package: read off the adapters' source, nothing is imported.

So it works where the package, or torch, is absent.
"""

import ast
import re
from dataclasses import dataclass
from functools import cache

from traceproof import codedigest
from traceproof.pipeline.adapters import adapter_modules
from traceproof.stacks import STACKS

BASE = "traceproof.ops.adapter"
PLACE = re.compile(r"[\w.]+:\w+")
CALLS = "ground_truths."  # in the name of a module that calls a package


@dataclass(frozen=True, slots=True, kw_only=True)
class Roots:
    """Where following begins."""

    apis: frozenset[str]  # `module:attribute`; one that does not exist at a version is no root there
    modules: frozenset[str]  # modules that the adapter imports by name, whatever it takes out of them
    attributes: frozenset[str]  # every attribute name in the adapter's code, since it calls methods of what it got


@cache
def roots(stack: str, op_type: str) -> Roots:
    """What the adapters of an op_type call. Keys may be put together at run time, so all of a module count."""
    table, package = STACKS[stack].apis, STACKS[stack].package
    texts, attributes = _names(stack, op_type)
    apis = {place for key in texts & table.keys() for place in table[key]}
    apis |= {text for text in texts if PLACE.fullmatch(text) and not text.startswith("traceproof.")}
    modules = {place.partition(":")[0] for place in apis}
    apis |= {place for places in table.values() for place in places if place.partition(":")[0] in modules}
    named = {text for text in texts if text.startswith(f"{package}.") and text.replace(".", "").isidentifier()}
    return Roots(apis=frozenset(apis), modules=frozenset(named), attributes=frozenset(attributes))


def _names(stack: str, op_type: str) -> tuple[set[str], set[str]]:
    """Texts in the adapters' modules and in the stack's own, and attributes in all that the adapters reach."""
    own = f"traceproof.stacks.{stack}"
    start = {name for name in codedigest.closure(own) if name.startswith(f"{own}.")}
    reached = codedigest.closure(*adapter_modules(stack, op_type), BASE)
    texts, attributes = set(STACKS[stack].modules), set()
    for module in start | {name for name in reached if name.startswith("traceproof.ops")}:
        held, named = _read(module)
        attributes |= named if module in reached else set()
        texts |= held if module in start or module == BASE or CALLS in module else set()
    return texts, attributes


def _read(module: str) -> tuple[set[str], set[str]]:
    """Texts and attributes in a module of ours."""
    nodes = list(ast.walk(ast.parse(codedigest.file_of(module).read_bytes())))
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    texts = {value for value in constants if isinstance(value, str)}
    return texts, {node.attr for node in nodes if isinstance(node, ast.Attribute)}

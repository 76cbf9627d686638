"""What an op_type's adapter calls in its stack's package: read off the adapters' source, nothing is imported.

So it works where the package, or torch, is absent.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from traceproof import codedigest
from traceproof.actors.registry import truths_of
from traceproof.ops.registry import ground_truth, known

ADAPTERS = "traceproof.adapters"
CALLS = ".ground_truths."  # in the name of a module that calls a package
# The package that a stack's ground truths are; a stack without one is keyed by its versions alone.
PACKAGES = {"flashinfer": "flashinfer", "sglang": "sglang", "fla": "fla"}
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
    used = (name for name in codedigest.closure(*([own] if own else [])) if name.endswith(f".{truth}"))
    return any(b"modules=" in codedigest._file(module).read_bytes() for module in used)  # noqa: SLF001 - as below


@cache
def roots(stack: str, op_type: str) -> Roots:
    """What the adapters of an op_type call. Keys may be put together at run time, so all of a module count."""
    table = api_table(stack)
    texts: set[str] = set()
    attributes: set[str] = set()
    for module in codedigest.closure(*adapter_modules(stack, op_type), f"{ADAPTERS}.base"):
        if not module.startswith((f"{ADAPTERS}.", "traceproof.ops")):
            continue
        path = codedigest._file(module)  # noqa: SLF001 - the one place that knows where modules lie
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
        attributes |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        if (module.startswith(f"{ADAPTERS}.") and not module.endswith(".api")) or CALLS in module:
            texts |= {
                node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
    boot = codedigest.SOURCE / "adapters" / stack / "boot.py"
    if boot.is_file():
        nodes = list(ast.walk(ast.parse(boot.read_bytes())))
        texts |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    apis = {place for key in texts & table.keys() for place in table[key]}
    modules = {place.partition(":")[0] for place in apis}
    apis |= {place for places in table.values() for place in places if place.partition(":")[0] in modules}
    package = PACKAGES[stack]
    named = {text for text in texts if text.startswith(f"{package}.") and text.replace(".", "").isidentifier()}
    return Roots(apis=frozenset(apis), modules=frozenset(named), attributes=frozenset(attributes))


@cache
def api_table(stack: str) -> dict[str, tuple[str, ...]]:
    """A stack's API keys and where they may be found."""
    parsed = ast.parse((codedigest.SOURCE / "adapters" / stack / "api.py").read_bytes())
    constants = {
        node.targets[0].id: node.value.value
        for node in parsed.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    found: dict[str, tuple[str, ...]] = {}
    for node in ast.walk(parsed):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                    found[str(key.value)] = tuple(_text(one, constants) for one in value.elts)
    return found


def _text(node: ast.expr, constants: Mapping[str, object]) -> str:
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(one, constants) for one in values)
        case ast.FormattedValue(value=ast.Name(id=name)):
            return str(constants[name])
    raise ValueError(f"line {node.lineno} of an api.py is no plain text")

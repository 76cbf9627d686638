"""How a norm is called: by the stages of SGLang's layers, and in the text of its holder's class.

Called with a second argument it adds that first; in a stage it does so where what it reads is a plain sum of the
output before and the residual.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn

ALONE, ADDING = "alone", "adding"
DEPTH = 4  # from a holder's attribute to the object of its stage that holds a norm


def uses(holder: nn.Module, name: str) -> list[str]:
    """`alone`, `adding` or both, sorted; none: nothing calls it.

    Args:
        holder: the module that holds it.
        name: its attribute there.
    """
    module = getattr(holder, name, None)
    staged = {how for value in vars(holder).values() for how in _staged(value, module, DEPTH)}
    cls: Any = type(holder)
    called, mentioned = _mentions(cls, name)
    if FINAL in called:
        called = (called - {FINAL}) | {_final(holder)}
    found = staged | called
    return sorted(found) if found or not mentioned else [ALONE]


FINAL = "final_norm"  # SGLang's function that ends a stack of stages


def _staged(value: Any, module: object, depth: int) -> Iterator[str]:  # noqa: ANN401 - SGLang's objects
    """How the stages below an attribute call a module."""
    if isinstance(value, nn.Module) or depth < 0:
        return
    plan = getattr(value, "plan", None)
    if plan is not None and getattr(plan, "norm", None) is module:
        for edges in plan.edges.values():
            edge = edges.incoming
            update = edge.produced.update
            plain = edge.arriving_plain_add if update is None else update.is_plain_add
            pending = plain and not plan.enters_stack and not edge.arrives_written
            yield ADDING if pending and edge.need.read.is_plain_norm else ALONE
        return
    names = [*vars(value)] if hasattr(value, "__dict__") else []
    names += [name for name in getattr(type(value), "__slots__", ()) if isinstance(name, str)]
    names += list(getattr(type(value), "__struct_fields__", ()))
    for name in names if type(value).__module__.startswith("sglang.") else ():
        inner = getattr(value, name, None)
        if inner is module:
            yield ALONE  # of an output, before it is added
        else:
            yield from _staged(inner, module, depth - 1)


def _final(holder: nn.Module) -> str:
    """How the norm after a stack is called: the last stage may have written its sum itself."""
    last = None
    for module in holder.modules():
        last = next((one for one in reversed(vars(module).values()) if hasattr(one, "declaration")), last)
    update = getattr(getattr(last, "declaration", None), "update", None)
    written = update is not None and (not update.is_plain_add or getattr(update, "applied_at_exit", False))
    return ALONE if written else ADDING


@cache
def _mentions(cls: Any, name: str) -> tuple[frozenset[str], bool]:  # noqa: ANN401 - a class
    """How the text of a class, or else that of its file, calls `name`, and whether it mentions it at all."""
    classes = [one for one in cls.__mro__ if one.__module__.startswith("sglang.")]
    texts = [textwrap.dedent(inspect.getsource(one)) for one in classes]
    for group in (texts, [inspect.getsource(inspect.getmodule(one) or one) for one in classes[:1]]):
        found: set[str] = set()
        mentioned = False
        for text in group:
            tree = ast.parse(text)
            for node in ast.walk(tree):
                mentioned |= _is(node, name)
                if isinstance(node, ast.Call):
                    found |= set(_call(node, name))
        if mentioned:
            return frozenset(found), True
    return frozenset(), False


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load)


def _call(node: ast.Call, name: str) -> Iterator[str]:
    if _is(node.func, name):
        given = [*node.args, *(one.value for one in node.keywords)][1:]
        yield ADDING if any(not (isinstance(one, ast.Constant) and one.value is None) for one in given) else ALONE
    elif getattr(node.func, "attr", getattr(node.func, "id", None)) == FINAL:
        yield from [FINAL] * any(_is(one, name) for one in node.args)

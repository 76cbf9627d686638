"""How a norm is called: by the stages of SGLang's layers, and in the text of its holder's class.

Called with a second argument it adds that first; in a stage it does so where what it reads is a plain sum of the
output before and the residual.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from torch import nn

ALONE, ADDING = "alone", "adding"
DEPTH = 4  # from a holder's attribute to the object of its stage that holds a norm
FINAL = "final_norm"  # SGLang's function that ends a stack of stages


def uses(holders: Sequence[tuple[nn.Module, str]]) -> list[str]:
    """`alone`, `adding` or both, sorted; `unknown`; none: nothing calls it.

    `holders` are the module that holds it with its attribute there, then what holds that, and so on.
    """
    holder, name = holders[0]
    module = getattr(holder, name, None)
    written: nn.Module = holder
    place: tuple[str, ...] = (name,)
    for above, inner in holders[1:]:  # a list or a plain module has no text that calls what it holds
        if _own_classes(type(written)):
            break
        written, place = above, (inner, *place)
    staged = {how for value in vars(written).values() for how in _staged(value, module, DEPTH)}
    cls: Any = type(written)
    called, mentioned = _mentions(cls, place)
    if FINAL in called:
        called = (called - {FINAL}) | {_final(written)}
    found = staged | called
    if found or not mentioned:
        return sorted(found) or ["unknown"] * (len(place) > 1)
    return [ALONE]


def _own_classes(cls: type) -> list[type]:
    return [one for one in cls.__mro__ if one.__module__.startswith("sglang.")]


def _staged(value: Any, module: object, depth: int) -> Iterator[str]:  # noqa: ANN401 - SGLang's objects
    """How the stages below an attribute call a module."""
    if isinstance(value, nn.Module) or depth < 0:
        return
    plan = getattr(value, "plan", None)
    if plan is not None and getattr(plan, "norm", None) is module:
        yield from _planned(plan)
        return
    for name in _fields(value):
        inner = getattr(value, name, None)
        if inner is module:
            yield ALONE  # of an output, before it is added
        else:
            yield from _staged(inner, module, depth - 1)


def _planned(plan: Any) -> Iterator[str]:  # noqa: ANN401 - SGLang's object
    """How a stage's plan calls its norm, for each edge into it."""
    for edges in plan.edges.values():
        edge = edges.incoming
        update = edge.produced.update
        plain = edge.arriving_plain_add if update is None else update.is_plain_add
        pending = plain and not plan.enters_stack and not edge.arrives_written
        yield ADDING if pending and edge.need.read.is_plain_norm else ALONE


def _fields(value: object) -> list[str]:
    """Names of the attributes that an object of SGLang holds; of another one none."""
    if not type(value).__module__.startswith("sglang."):
        return []
    names = [*vars(value)] if hasattr(value, "__dict__") else []
    names += [name for name in getattr(type(value), "__slots__", ()) if isinstance(name, str)]
    return names + list(getattr(type(value), "__struct_fields__", ()))


def _final(holder: nn.Module) -> str:
    """How the norm after a stack is called: the last stage may have written its sum itself."""
    last = None
    for module in holder.modules():
        last = next((one for one in reversed(vars(module).values()) if hasattr(one, "declaration")), last)
    update = getattr(getattr(last, "declaration", None), "update", None)
    written = update is not None and (not update.is_plain_add or getattr(update, "applied_at_exit", False))
    return ALONE if written else ADDING


@cache
def _mentions(cls: Any, place: tuple[str, ...]) -> tuple[frozenset[str], bool]:  # noqa: ANN401 - a class
    """How the text of a class, or else of its file, calls what stands at `place`, and whether it mentions it."""
    classes = _own_classes(cls)
    texts = [textwrap.dedent(inspect.getsource(one)) for one in classes]
    for group in (texts, [inspect.getsource(inspect.getmodule(one) or one) for one in classes[:1]]):
        nodes = [node for text in group for node in ast.walk(ast.parse(text))]
        if any(_is(node, place) for node in nodes):
            return frozenset(
                how for node in nodes if isinstance(node, ast.Call) for how in _call(node, place)
            ), True
    return frozenset(), False


def _is(node: ast.AST, place: Sequence[str]) -> bool:
    """Whether a node reads `.norm`, `.head.norm` or, of a list, `.norms[...]`."""
    *above, name = place
    if name.isdigit():
        return isinstance(node, ast.Subscript) and _is(node.value, above)
    if not isinstance(node, ast.Attribute) or node.attr != name or not isinstance(node.ctx, ast.Load):
        return False
    return not above or _is(node.value, above)


def _call(node: ast.Call, place: Sequence[str]) -> Iterator[str]:
    if _is(node.func, place):
        given = [*node.args, *(one.value for one in node.keywords)][1:]
        yield ADDING if any(not (isinstance(one, ast.Constant) and one.value is None) for one in given) else ALONE
    elif getattr(node.func, "attr", getattr(node.func, "id", None)) == FINAL:
        yield from [FINAL] * any(_is(one, place) for one in node.args)

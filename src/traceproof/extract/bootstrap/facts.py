"""A laid-out model, module by module, as plain facts: what it is, its shapes on this rank, how often it occurs.

Classes are recognised by the names in their inheritance (SGLang's own layers), so that a model's subclass of a
layer counts as that layer. Everything else is a `block`.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import nn

from traceproof.extract.bootstrap.uses import uses
from traceproof.ops.extraction import Facts, extractions

LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


def describe(model: nn.Module) -> list[dict[str, Any]]:
    """Every module once per (path with layer numbers starred, holder's class, class, facts), with its count.

    In model order. Shared instances (rotary embeddings) count at each place that holds them.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, dict[str, Any]] = {}
    for path, module in modules.items():
        if ".quant_method" in path:
            continue  # how a layer multiplies, not a layer
        parent = path.rpartition(".")[0]
        holder = modules[parent] if path else None
        kind, facts = classify(module, holder)
        called = uses(_holders(modules, path)) if kind == "norm" else []
        entry = {
            "path": LAYER_INDEX.sub("*", path),
            "parent": LAYER_INDEX.sub("*", parent) if path else None,
            "parent_class": type(holder).__name__ if holder is not None else None,
            "class": type(module).__name__,
            "kind": kind,
            "facts": facts,
            "uses": called,
        }
        key = repr(entry)
        found.setdefault(key, entry | {"count": 0, "source": source(holder, path)})["count"] += 1
    return list(found.values())


def _holders(modules: Mapping[str, nn.Module], path: str) -> list[tuple[nn.Module, str]]:
    found = []
    while path:
        path, _, name = path.rpartition(".")
        found.append((modules[path], name))
    return found


def source(holder: nn.Module | None, path: str) -> str:
    """File and line of the class of `holder` that makes the module; "": not found."""
    name = path.rpartition(".")[2]
    for ancestor in type(holder).__mro__ if holder is not None else ():
        if not ancestor.__module__.startswith("sglang."):
            continue
        file, lines, start = lines_of(ancestor)
        for number, line in enumerate(lines):
            if re.match(rf"\s*self\.{re.escape(name)}\s*(:[^=]+)?=[^=]", line):
                return f"{file}:{start + number}"
    return ""


@cache
def lines_of(cls: type) -> tuple[str, list[str], int]:
    """File within SGLang, text and first line of a class."""
    lines, start = inspect.getsourcelines(cls)
    return (inspect.getsourcefile(cls) or "").rpartition("/srt/")[2], lines, start


def classify(module: nn.Module, parent: nn.Module | None) -> tuple[str, Facts]:
    """Kind and facts of one module; `parent` helps where a layer leaves its context to whoever holds it."""
    for ancestor in type(module).__mro__:
        if ancestor.__name__ in readers():
            kind, reader = readers()[ancestor.__name__]
            return kind, reader(module, parent)
    own = {name: list(one.shape) for name, one in module.named_parameters(recurse=False) if one.dim() > 1}
    if list(own) == ["weight"] and len(own["weight"]) == 2 and not list(module.children()):
        kind, reader = readers()["LinearBase"]  # a router that is no class of SGLang's layers
        return kind, reader(module, parent)
    return ("weights", own) if own else ("block", {})


def _embedding(module: Any, _parent: Any) -> Facts:  # noqa: ANN401 - SGLang's objects
    vocab = getattr(module, "org_vocab_size", None) or module.num_embeddings
    return {"vocab": vocab, "hidden": module.embedding_dim}


@cache
def readers() -> Mapping[str, tuple[str, Callable[[Any, Any], Facts]]]:
    """SGLang's class -> the kind of module that it is, and what reads its facts, of all op_types."""
    found = {"ParallelLMHead": ("lm_head", _embedding)}
    found |= dict.fromkeys(("VocabParallelEmbedding", "Embedding"), ("embedding", _embedding))
    for extraction in extractions():
        found |= extraction.readers
    return found

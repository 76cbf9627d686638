"""A test file, read: its functions, its tests, and what each test reaches inside the file."""

import ast
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from traceproof.dependents.facts import dotted_name
from traceproof.reading import parse_quietly

Function = ast.FunctionDef | ast.AsyncFunctionDef


class TestFile:
    """One file, at a path relative to the folder that is audited. Raises SyntaxError: it is not Python."""

    __test__ = False  # its name begins as a test's does

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.lines = text.splitlines()
        self.tree = parse_quietly(text)

    @cached_property
    def functions(self) -> dict[str, Function]:
        """Functions of the file and of its classes, by name."""
        found: dict[str, Function] = {}
        for node in self.tree.body:
            inside = node.body if isinstance(node, ast.ClassDef) else [node]
            found |= {one.name: one for one in inside if isinstance(one, Function)}
        return found

    @cached_property
    def tests(self) -> tuple[Function, ...]:
        """What pytest collects by name."""
        return tuple(node for name, node in self.functions.items() if name.startswith("test"))

    @cached_property
    def bases(self) -> tuple[str, ...]:
        """What the file's test classes inherit from, where they inherit from anything."""
        classes = [
            node for node in self.tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test")
        ]
        return tuple(sorted({dotted(base) for node in classes for base in node.bases} - {"", "object"}))

    def reached(self, function: Function) -> tuple[Function, ...]:
        """The function and those of the file that it calls, and so on."""
        found: dict[str, Function] = {}
        waiting = [function]
        while waiting:
            node = waiting.pop()
            if node.name in found:
                continue
            found[node.name] = node
            waiting += [self.functions[name] for name in called(node) if name in self.functions]
        return tuple(found.values())


def called(node: ast.AST) -> Iterator[str]:
    """Last names of what is called below a node."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            yield last_name(call.func)


def last_name(node: ast.expr) -> str:
    """`allclose` of `torch.allclose`; empty for what has no name."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""


def dotted(node: ast.expr) -> str:
    """`torch.cuda.is_available` of that attribute chain; empty for anything else."""
    return ".".join(dotted_name(node))

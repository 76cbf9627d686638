"""Texts of generated files: a test file per op_type, the conftest, and the support package.

The support package is the modules of this package that generated tests need, written beside them. Each file is the
module as it stands here under another name, since an installed traceproof may be of another version. That name has
as many letters as the old one, so that the formatting stays.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

import traceproof
from traceproof.digests import PACKAGE, SOURCE, digest_bytes, digest_json, file_of, imported
from traceproof.files import MIB, read_bytes
from traceproof.ops import registry
from traceproof.text import literal, unquoted

NAME = "tp_support"
OWN = f"{PACKAGE}.testgen.support"
COMMAND = "traceproof add-reference-tests"
# Packages of which single modules are taken: their own first lines import too much.
HOLLOW = frozenset({PACKAGE, f"{PACKAGE}.dataset", f"{PACKAGE}.testgen", OWN})
CHECKOUTS = "CHECKOUTS"  # the constant of the conftest that names checkouts by stack
# Found by listing folders, so nothing imports them by name: packages, and an op_type's oracle, rules of constants
# and ground truths.
LISTED = f"{PACKAGE}.stacks"
ROOTS = (
    *(f"{OWN}.{name}" for name in ("suite", "trial")),
    # Named by strings: what workers are started with.
    *(f"{PACKAGE}.{name}" for name in ("run.runner", "sandbox.worker")),
)
RENAMED = re.compile(rf"\b{PACKAGE}(?=\.[a-z_{{]| import |:)|(?<=^import ){PACKAGE}$", re.MULTILINE)


@cache
def support_files() -> Mapping[str, str]:
    """Text of every file of the support package by its path, the same whenever this code is."""
    files = {}
    for module in sorted(_closure()):
        path = _path(module)
        if module not in HOLLOW:
            head = f"# {module} of traceproof {traceproof.__version__}; written by `{COMMAND}`, edits are lost.\n"
            files[path] = head + renamed(_source(module))
        elif path.endswith("__init__.py"):
            files[path] = f'"""Modules of {module}."""\n'
    digest = digest_json(files)
    files[f"{NAME}/__init__.py"] = (
        f'"""What the tests beside this folder need: inputs, oracles, judge and adapters of traceproof.\n\n'
        f"traceproof {traceproof.__version__}, digest {digest}. Written by `{COMMAND}`; edits are lost.\n"
        f'Start reading at suite.py.\n"""\n'
    )
    return MappingProxyType(dict(sorted(files.items())))


def conftest(checkouts: Mapping[str, str]) -> str:
    """The conftest's text, with the checkouts that tests use set, by stack."""
    text = _source(f"{OWN}.conftest")
    line = next(line for line in text.splitlines() if line.startswith(f"{CHECKOUTS}: "))
    items = ", ".join(f"{literal(name)}: {literal(path)}" for name, path in sorted(checkouts.items()))
    return renamed(text.replace(line, f"{line.partition(' = ')[0]} = {{{items}}}", 1))


def checkouts_of(text: str) -> dict[str, str]:
    """The checkouts that a written conftest sets."""
    found: dict[str, str] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == CHECKOUTS:
            assert node.value is not None
            found = ast.literal_eval(node.value)
    return found


def renamed(text: str) -> str:
    """A module's text under the support package's name."""
    text = text.replace(OWN, NAME)
    return RENAMED.sub(NAME, text)


def _path(module: str) -> str:
    """Where a module's file stands beside the tests."""
    place = module.replace(OWN, NAME).replace(PACKAGE, NAME, 1) if module.startswith(PACKAGE) else module
    folder = place.replace(".", "/")
    return f"{folder}/__init__.py" if file_of(module).name == "__init__.py" else f"{folder}.py"


def _source(module: str) -> str:
    return file_of(module).read_text(encoding="utf-8")


def _closure() -> set[str]:
    """The modules to write: the roots, the listed packages, and all that they import."""
    found: set[str] = set()
    declaring = (registry.module(op_type) for op_type in registry.known())
    listed = SOURCE.parent.joinpath(*LISTED.split(".")).rglob("*.py")
    places = (path.relative_to(SOURCE.parent).with_suffix("") for path in sorted(listed))
    modules = (".".join(place.parent.parts if place.name == "__init__" else place.parts) for place in places)
    waiting = [*ROOTS, *modules, "traceproof.ops.generic", *filter(None, declaring)]
    while waiting:
        module = waiting.pop()
        if module in found or module.partition(".")[0] != PACKAGE or not file_of(module).is_file():
            continue
        found.add(module)
        waiting.append(module.rpartition(".")[0])
        if module not in HOLLOW:
            waiting += imported(module)
    return found - {OWN, OWN.rpartition(".")[0]}


MARKER = f"# Written by `{COMMAND}`"
CLASS = re.compile(
    r'(?ms)^class \w+\(ReferenceTests\):\n.*?^    definition_name = "(\w+)"\n.*?(?=^class |^if __name__|\Z)'
)
HEADED = re.compile(rf"{re.escape(MARKER)}, digest (\w+) of what follows\.\n")
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
WIDTH = 115
TAIL = 'if __name__ == "__main__":\n    run(__file__)\n'  # as a script, a file runs itself with pytest
LARGEST = 16 * MIB  # of a test file


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A definition that gets a class."""

    name: str  # of the definition
    file: str  # below `definitions/`
    # what its reference computes with: const axes, and numbers that it gives names to
    constants: Mapping[str, int | float]
    divergences: tuple[str, ...]  # cases that are known to diverge
    # sizes, tolerance: what the tests of this class take where the command line says nothing; None: the default
    sizes: tuple[str, ...] | None = None
    tolerance: float | None = None


def file_name(op_type: str) -> str:
    """The file of an op_type's tests."""
    return f"test_{op_type}.py"


def class_names(names: Iterable[str]) -> dict[str, str]:
    """A class name for each definition: CamelCase, with underscores kept where two would be the same."""
    wanted = sorted(names)
    short = {name: "Test" + "".join(part[:1].upper() + part[1:] for part in name.split("_")) for name in wanted}
    taken = list(short.values())
    return {name: text if taken.count(text) == 1 else f"Test_{name}" for name, text in short.items()}


def classes(text: str) -> dict[str, str]:
    """Source of every class in a generated file, by its definition."""
    return {found[1]: found[0].strip("\n") for found in CLASS.finditer(text)}


def render(op_type: str, subjects: Iterable[Subject], kept: Mapping[str, str]) -> str:
    """A test file: new classes for the subjects, and classes that stay as they are."""
    new = {subject.name: subject for subject in subjects}
    names = class_names([*new, *kept])
    blocks = {name: kept[name] for name in kept if name not in new}
    blocks |= {name: _class(names[name], subject) for name, subject in new.items()}
    head = (
        f"{MARKER}; edits are lost with --force.\n"
        f'"""Reference tests of op_type {op_type}: `pytest tests/references/{file_name(op_type)} -v`."""\n\n'
        f"from {NAME}.suite import ReferenceTests, run\n"
    )
    return head + "".join(f"\n\n{blocks[name]}\n" for name in sorted(blocks)) + f"\n\n{TAIL}"


def _class(name: str, subject: Subject) -> str:
    name_of = unquoted(subject.name)
    lines = [f"class {name}(ReferenceTests):"]
    if subject.divergences:
        lines += [f'    """The reference of {name_of}. It is known to diverge, so these tests fail:', ""]
        lines += [f"    - {unquoted(line)}" for line in subject.divergences]
        lines.append('    """')
    else:
        lines.append(f'    """The reference of {name_of}."""')
    lines += ["", f"    definition_name = {literal(subject.name)}"]
    lines += [f"    definition_file = {literal(subject.file)}"]
    lines += _constants(subject.constants)
    if subject.sizes is not None:
        lines.append(f"    test_sizes = {literal(subject.sizes)}")
    if subject.tolerance is not None:
        lines.append(f"    tolerance = {literal(subject.tolerance)}")
    return "\n".join(lines)


def _constants(values: Mapping[str, int | float]) -> list[str]:
    """One line where it fits, else one line per constant: as a formatter would write it."""
    items = [f"{literal(name)}: {literal(value)}" for name, value in values.items()]
    line = f"    constants = {{{', '.join(items)}}}"
    if len(line) <= WIDTH:
        return [line]
    return ["    constants = {", *(f"        {item}," for item in items), "    }"]


def headed(body: str) -> str:
    """A file with a digest of its body in front, by which a later run sees that nobody has edited it."""
    return f"{MARKER}, digest {digest_bytes(body.encode())} of what follows.\n{body}"


def state(path: Path) -> str:
    """Whose a headed file is: `absent`, `ours`, `edited` or `foreign`."""
    if not path.exists() and not path.is_symlink():
        return "absent"
    try:
        text = read_bytes(path, most=LARGEST).decode()
    except (OSError, ValueError):
        return "foreign"
    found = HEADED.match(text)
    if found is None:
        return "foreign"
    return "ours" if headed(text[found.end() :]) == text else "edited"

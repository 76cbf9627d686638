"""The support package: the modules of this package that generated tests need, written beside them.

Each file is the module as it stands here, the case engine among them, under another name: an installed traceproof
may be of another version. That name has as many letters as the old one, so that the formatting stays.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType

import traceproof
from traceproof.codedigest import PACKAGE, SOURCE, file_of, imported
from traceproof.digests import digest_json
from traceproof.ops import registry
from traceproof.stacks import TRUTHS
from traceproof.text import literal

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
    *(f"{OWN}.{name}" for name in ("suite", "trial", "cases", "helpers")),
    # Named by strings: what workers are started with.
    *(f"{PACKAGE}.{name}" for name in ("run.runner", "sandbox.zygote")),
)
RENAMED = re.compile(rf"\b{PACKAGE}(?=\.[a-z_{{]| import |:)|(?<=^import ){PACKAGE}$", re.MULTILINE)


@cache
def support_files() -> Mapping[str, str]:
    """Text of every file of the support package by its path, the same whenever this code is."""
    files = {}
    for module in sorted(_closure()):
        path = _path(module)
        if module not in HOLLOW:
            files[path] = _header(module) + renamed(_source(module))
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


def _header(module: str) -> str:
    return f"# {module} of traceproof {traceproof.__version__}; written by `{COMMAND}`, edits are lost.\n"


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
    deciding = (name for op_type in registry.known() for name in registry.deciding(op_type))
    served = (registry.ground_truth(op_type, truth) for op_type in registry.known() for truth in TRUTHS)
    waiting = [*ROOTS, *_modules_of(LISTED), *deciding, *filter(None, served)]
    while waiting:
        module = waiting.pop()
        if module in found or not _exists(module):
            continue
        found.add(module)
        waiting.append(module.rpartition(".")[0])
        if module not in HOLLOW:
            waiting += imported(module)
    return found - {OWN, OWN.rpartition(".")[0]}


def _modules_of(package: str) -> Iterator[str]:
    folder = SOURCE.parent / package.replace(".", "/")
    for path in sorted(folder.rglob("*.py")):
        place = path.relative_to(SOURCE.parent).with_suffix("")
        yield ".".join(place.parent.parts if place.name == "__init__" else place.parts)


def _exists(module: str) -> bool:
    return module.partition(".")[0] == PACKAGE and file_of(module).is_file()

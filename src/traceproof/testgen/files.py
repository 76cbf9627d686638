"""Text of the generated test files: one per op_type, one class per definition."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from traceproof.digests import digest_bytes
from traceproof.reading import MIB, read_bytes
from traceproof.testgen.bundle import COMMAND, NAME
from traceproof.text import literal, unquoted

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

"""Ops are declared as data: read without PyTorch, and by packages of other people as by this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from traceproof.ops import registry

SRC = Path(registry.__file__).resolve().parents[2]
WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
OWN = """
from traceproof.ops.formula import Form, FormulaOp, Mutant, Variant


def half(wide, *, by=2.0):
    return {"y": wide["x"] / by}


HALF = FormulaOp(
    "half",
    Form("x[n h] -> y[n h]", half),
    family="mine",
    variants=[Variant("float32")],
    mutants=[Mutant("a third", by=3.0)],
)


@HALF.truth("torch", "div", "torch:div", serves="x -> y", rows=None)
def _div(api, definition, inputs):
    return {"y": api["torch:div"](inputs["x"], 2)}
"""
USED = """
from traceproof.dataset.definition import Definition
from traceproof.ops import lookup, registry
from traceproof.run.case import solved

tensor = {"shape": ["n", "h"], "dtype": "float32"}
definition = Definition.model_validate({
    "name": "half_h8", "op_type": "half", "tags": [], "inputs": {"x": tensor}, "outputs": {"y": tensor},
    "axes": {"n": {"type": "var"}, "h": {"type": "const", "value": 8}},
    "reference": "def run(x):\\n    return x / 2\\n",
})
op, unknown = registry.for_definition(definition)
subject = next(solved(definition, ("small",), 0))
right, wrong = (made.make(subject)["y"] for made in (op.variants[0], op.mutants[0]))
adapter = lookup.adapter("torch", definition)
print(unknown, registry.families()["mine"], adapter.name, registry.file_of("half").name)
print(*(subject.ruling("y", outputs).verdict for outputs in (right, wrong)))
"""


def said(program: str, *folders: Path) -> list[str]:
    """The lines that a program prints, which imports from some folders."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SRC, *folders)))}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return ran.stdout.splitlines()


def package(folder: Path, code: str) -> None:
    """An installed package that declares ops by its entry point."""
    (folder / "own_ops.py").write_text(code)
    about = folder / "own_ops-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-ops\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[traceproof.ops]\nmine = own_ops\n")


def test_ops_are_read_without_pytorch() -> None:
    program = (
        f"{WITHOUT}\nfrom traceproof.dataset.constants import ruled\nfrom traceproof.ops import registry\n"
        "print(*registry.declarations())\nprint(*registry.families())\nprint(*ruled())\n"
        "op, none = registry.get('rmsnorm'), registry.get('none')\n"
        "print(*op.truths, op.extraction is not None, none.family == '')"
    )
    declared, families, ruled, facts = said(program)
    assert declared.split() == list(registry.declarations())
    assert families.split() == list(registry.families())
    assert set(ruled.split()) <= set(registry.known())
    assert facts == " ".join([*registry.get("rmsnorm").truths, "True", "True"])


def test_a_package_of_somebody_else_declares_an_op(tmp_path: Path) -> None:
    package(tmp_path, OWN)
    first, second = said(USED, tmp_path)
    assert first == "None ('half',) div own_ops.py"
    assert second == "pass fail"


def test_a_module_of_ops_that_can_not_be_imported_says_whose_it_is(tmp_path: Path) -> None:
    package(tmp_path, "import no_such_package\n")
    program = (
        "from traceproof.errors import TraceproofError\nfrom traceproof.ops import registry\n"
        "try:\n    registry.known()\nexcept TraceproofError as error:\n    print(error)\n"
    )
    [line] = said(program, tmp_path)
    assert line.startswith("own-ops names own_ops as a module of ops, which can not be imported: No module named")

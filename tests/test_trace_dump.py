"""What a dumped reference lacks is put in front of it, and a table says what became of each definition."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dumped_source import completed

FILES = {
    "__init__.py": "",
    "helpers.py": (
        "import math as m\nfrom .numbers import HALF as PART\nfrom functools import lru_cache\n\n"
        "def kernel(x):\n    import ctypes\n    return ctypes.c_float(x)\n\n"
        "@lru_cache\ndef shift(x: 'Shift') -> 'Shift':\n    return m.floor(x) + PART\n"
    ),
    "modes.py": (
        "from enum import IntEnum\n\n\nclass Mode(IntEnum):\n    ONE = 1\n    TWO = 2\n\n"
        "    def known(self):\n        return self in KNOWN\n\n\nKNOWN = frozenset([Mode.TWO])\n"
    ),
    "numbers.py": "HALF = (\n    0.5\n)\n",
    "templates.py": (
        "from made_up.helpers import kernel, shift as moved\nfrom made_up.modes import Mode\n\n"
        "def _scaled(x):\n    from .helpers import shift\n    total = moved(x) + shift(x)\n    return total\n\n"
        "def _kernel_reference(x):\n    return x * 2\n\n"
        "def _init(x):\n    return {'x': kernel(x)}\n\n"
        "def _choosing(x):\n    if x > 9:\n        from .helpers import kernel\n        return kernel(x)\n"
        "    return x + 1\n\n"
        "def _moded(x, mode=Mode.TWO.value):\n    return Mode(mode).known()\n"
    ),
}


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401 - a module
    (tmp_path / "made_up").mkdir()
    for name, text in FILES.items():
        (tmp_path / "made_up" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "made_up"]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("made_up.templates")


def dumped(templates: Any) -> tuple[dict[str, str], Any]:  # noqa: ANN401 - a module, a template
    head = "from __future__ import annotations\nimport math\n\n"
    source = FILES["templates.py"].split("\n\n")
    made = {"reference": head + source[1] + "\n", "init": head + source[3]}
    return made, SimpleNamespace(reference=templates._scaled, init=templates._init)


def ran(text: str, name: str, value: float) -> Any:  # noqa: ANN401 - what it returns
    module: dict[str, Any] = {}
    exec(text, module)  # noqa: S102 - written above
    return module[name](value)


def test_functions_constants_and_imports_stand_in_front_of_a_reference(templates: Any) -> None:  # noqa: ANN401
    made, template = dumped(templates)
    found, told = completed(made, template, "made_up", {})
    assert "made_up" not in found["reference"]
    assert ran(found["reference"], "_scaled", 3.5) == 7.0
    assert any(line.startswith("reference: ") for line in told)


def test_what_needs_more_than_torch_stays_as_it_is(templates: Any) -> None:  # noqa: ANN401 - a module
    made, template = dumped(templates)
    found, told = completed(made, template, "made_up", {})
    assert found["init"] == made["init"]
    assert "init stays as it is: it needs ctypes" in told


def test_a_kernel_that_has_a_template_is_its_template_s_reference(templates: Any) -> None:  # noqa: ANN401 - a module
    made, template = dumped(templates)
    helpers = importlib.import_module("made_up.helpers")
    found, _ = completed(made, template, "made_up", {helpers.kernel: templates._kernel_reference})
    assert ran(found["init"], "_init", 4.0) == {"x": 8.0}

"""Files that anybody may leave in a dataset: each is written beside good ones by a test."""

from __future__ import annotations

import copy
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from definitions import GOOD, rmsnorm

Json = dict[str, Any]


def changed(name: str, **changes: Any) -> str:  # noqa: ANN401 - JSON
    """A definition with keys replaced, dotted by double underscores."""
    value: Json = copy.deepcopy(rmsnorm(name))
    for path, new in changes.items():
        *parents, last = path.split("__")
        place: Any = value
        for parent in parents:
            place = place[parent]
        place[last] = new
    return json.dumps(value)


CONST = "axes__hidden_size__value"
FAR = {f"a{number}": {"type": "const", "value": 1} for number in range(1000)}
# What a definition's file holds: (text, whether it is a definition all the same).
TEXTS: dict[str, str] = {
    "empty": "",
    "list": "[]",
    "cut": changed("x")[:100],
    "twice": '{"name": "a", "name": "b"}',
    "deep": "[" * 100_000,
    "deep_object": '{"a":' * 50_000,
    "nan": changed("x").replace('"value": 32', '"value": NaN'),
    "infinity": changed("x").replace('"value": 32', '"value": 1e400'),
    "many_digits": changed("x").replace('"value": 32', f'"value": {"9" * 10_000}'),
    "fraction": changed("x", **{CONST: 32.5}),
    "true": changed("x", **{CONST: True}),
    "below": changed("x", **{CONST: -1}),
    "kindless": changed("x", axes__hidden_size={"value": 32}),
    "axis_null": changed("x", axes__hidden_size=None),
    "axes_none": changed("x", axes={}),
    "axes_many": changed("x", axes=FAR),
    "dimensions": changed("x", inputs__weight__shape=["hidden_size"] * 1000),
    "dtype": changed("x", inputs__weight__dtype="float7"),
    "shape_text": changed("x", inputs__weight__shape="hidden_size"),
    "outputs_none": changed("x", outputs={}),
    "reference_null": changed("x", reference=None),
    "reference_no_code": changed("x", reference="def run(:"),
    "reference_null_byte": changed("x", reference=GOOD + "\x00"),
    "reference_surrogate": changed("x").replace("import torch", "import torch # \\ud800"),
    "surrogate_name": changed("x").replace('"name": "x"', '"name": "\\udcff"'),
    "surrogate_key": changed("x").replace('"tags"', '"\\udcff"'),
    "surrogate_axis": changed("x").replace('"batch_size"', '"\\udcff"'),
    "reference_deep": changed("x", reference=GOOD + "\nx = " + "(" * 3000 + ")" * 3000),
    "reference_operators": changed("x", reference=GOOD + "\nx = " + "-" * 100_000 + "1"),
    "constraint": changed("x", constraints=["(" * 10_000]),
    "constraint_null": changed("x", constraints=["a\x00"]),
    "tag_lines": changed("x", tags=["a\nVERIFIED: 9 definitions: 9 pass"]),
    "tag_escape": changed("x", tags=["\x1b]0;owned\x07"]),
    "extra_key": changed("x", **{"\x1b[2J": 1}),
}
# A definition all the same, with which an op or a rule may have trouble.
ODD: dict[str, str] = {
    "chain": changed("chain", reference=GOOD + "\nx = torch" + ".a" * 20_000),
    "sum": changed("sum", reference=GOOD + "\nx = " + "1+" * 5_000 + "1"),
    "zero": changed("zero", **{CONST: 0}),
    "huge": changed("huge", **{CONST: 1 << 40}),
    "eps": changed("eps", reference=GOOD.replace("1e-6", "1e400")),
    "many_digits_eps": changed("many_digits_eps", reference=GOOD.replace("1e-6", "9" * 4000)),
    "scalars": changed("scalars", inputs__weight__shape=None),
    "no_shape": changed("no_shape", inputs__weight__shape=[]),
    "other_op": changed("other_op", op_type="moe"),
    "unknown_op": changed("unknown_op", op_type="base"),
    "parent": changed("parent", axes__batch_size={"type": "var", "parent": "batch_size"}),
    "sixty_four": changed("sixty_four", inputs__weight__shape=["hidden_size"] * 64),
    "divides": changed("divides", constraints=["batch_size // 0 == 1", "batch_size ** batch_size > 0"]),
    "power": changed("power", constraints=["9 ** 9 ** 9 > hidden_size"]),
}


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    here = os.open(path.parent, os.O_RDONLY)
    server.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)
    server.close()


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def unreadable(path: Path) -> None:
    path.write_text("{}")
    path.chmod(0)


def outside(path: Path) -> None:
    target = path.parents[3] / "outside.json"
    target.write_text(changed("outside"))
    path.symlink_to(target)


# What stands where a definition's file should.
FILES: dict[str, Callable[[Path], object]] = {
    "pipe": fifo,
    "socket": listening,
    "zero_device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "circle": circle,
    "folder": lambda path: path.mkdir(),
    "sparse": sparse,
    "outside": outside,
    "process": lambda path: path.symlink_to("/proc/self/environ"),
    "not_utf8": lambda path: path.write_bytes(b"\xff\xfe{}"),
    "utf16": lambda path: path.write_bytes(changed("x").encode("utf-16")),
    "unreadable": unreadable,
}


def write(root: Path) -> None:
    """All of them, and a good one, in the folder of one op_type."""
    folder = root / "definitions" / "rmsnorm"
    folder.mkdir(parents=True)
    for name, text in TEXTS.items():
        (folder / f"{name}.json").write_text(text)
    for name, text in ODD.items():
        (folder / f"{name}.json").write_text(text)
    for name, make in FILES.items():
        make(folder / f"{name}.json")
    (folder / "good.json").write_text(json.dumps(rmsnorm("good")))
    (folder / os.fsdecode(b"\xff\n\x1b[31m.json")).write_text("{")

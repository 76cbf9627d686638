"""A model's modules for the web interface: their nesting, counts and definitions."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain, count
from typing import Any

from traceproof.errors import TraceproofError
from traceproof.models.reading import ModelModule, Reading

IDENTIFIER = re.compile(r"[A-Za-z_$][\w$]*\Z")
END_OF_LIST = re.compile(r"^\](?: satisfies Model\[\])?;?[ \t]*\r?$", re.MULTILINE)
LINE = 100  # characters; the interface's formatter breaks longer lines


def modules_of(reading: Reading, definitions: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """The modules in model order, each (path, class) once, as models.ts has them; `definitions` go by module path.

    A module has `count`, `parent` (except the model itself), `type` (`block` if it holds others, else `layer`) and
    `definitions`. A decoder layer is named by its class, any other module by its attribute; a second module of a
    name gets its holder's name in front. A module in two kinds of layers is listed under the one that holds more
    of them.
    """
    groups: dict[tuple[str, str], list[ModelModule]] = {}
    for module in reading.modules:
        groups.setdefault((module.path, module.class_name), []).append(module)
    holders = {(module.parent, module.parent_class) for module in reading.modules}
    keys: dict[tuple[str, str], str] = {}
    by_name: dict[str, dict[str, Any]] = {}
    for place, members in groups.items():
        most = max(members, key=lambda module: module.count)
        holder = keys.get((most.parent or "", most.parent_class or "")) if most.parent is not None else None
        last = place[0].rpartition(".")[2]
        name = place[1] if last in {"", "*"} else last
        name = f"{holder}_{name}" if name in by_name and holder is not None else name
        numbered = chain([name], (f"{name}_{number}" for number in count(2)))
        keys[place] = key = next(free for free in numbered if free not in by_name)
        by_name[key] = {
            "count": sum(module.count for module in members),
            **({} if holder is None else {"parent": holder}),
            "type": "block" if place in holders else "layer",
            "definitions": list(definitions.get(place[0], ())),
        }
    return by_name


def typescript(model: Mapping[str, Any]) -> str:
    """The model as TypeScript: an element of the list in models.ts."""
    lines = ["  {"]
    lines += [f"    {key}: {_string(model[key])}," for key in ("id", "name", "description")]
    lines.append("    modules: {")
    for key, module in model["modules"].items():
        lines.append(f"      {key if IDENTIFIER.match(key) else _string(key)}: {{")
        lines.append(f"        count: {module['count']},")
        lines += [f"        {part}: {_string(module[part])}," for part in ("parent", "type") if part in module]
        line = f"        definitions: [{', '.join(map(_string, module['definitions']))}],"
        listed = [f"          {_string(name)}," for name in module["definitions"]]
        lines += [line] if len(line) <= LINE else ["        definitions: [", *listed, "        ],"]
        lines.append("      },")
    return "\n".join([*lines, "    },", "  },"]) + "\n"


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def inserted(text: str, model: Mapping[str, Any]) -> str:
    """The text of a models.ts with the model added at the end of its list; all else unchanged.

    Raises TraceproofError: the list's end is not found, or the model is already there.
    """
    if re.search(rf"\bid:\s*[\"']{re.escape(model['id'])}[\"']", text):
        todo = "Remove that entry first, or use another name."
        raise TraceproofError(f"models.ts already has a model {model['id']!r}", todo=todo)
    ends = list(END_OF_LIST.finditer(text))
    if len(ends) != 1:
        what = f"models.ts has {len(ends)} lines that could end its list of models; exactly one is needed"
        raise TraceproofError(what, todo="The list must be closed by a line `]` or `] satisfies Model[]`.")
    newline = "\r\n" if "\r\n" in text else "\n"
    place = ends[0].start()
    head = text[:place]
    body = head.rstrip()
    if not body.endswith((",", "[")):
        head = body + "," + head[len(body) :]  # the last element has no trailing comma
    return head + typescript(model).replace("\n", newline) + text[place:]

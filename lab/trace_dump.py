"""Write every definition that the trace templates of the installed FlashInfer can write, one file per template.

Run it with an interpreter that has FlashInfer (that of the stack); no GPU is needed. Sizes are those of each
template's own `init`, tried without memory first; a template whose `init` raises is written without sizes.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--out", type=Path, required=True, help="a folder, made if it is not there")
PARSER.add_argument("--only", nargs="*", default=[], help="write definitions of these op_types alone")
SIZES = {"batch_size": 4, "num_tokens": 16, "seq_len": 16}
OTHER = 8
PHASES = {"plan", "run", "init", "ctor", "constructor", "wrapper"}


def import_all(package: Any) -> list[str]:  # noqa: ANN401 - a module
    """Import a package's modules, whose decorators register templates; gives those that can not be imported."""
    lost: list[str] = []
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lost.append):
        try:
            importlib.import_module(found.name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a package's module does without a GPU
            lost.append(f"{found.name}: {type(error).__name__}")
    return lost


def arguments(init: Any) -> dict[str, Any]:  # noqa: ANN401 - a template's function
    """What a template's `init` makes, phases of a call put together; nothing where it raises."""
    known = inspect.signature(init).parameters
    given = {name: SIZES.get(name, OTHER) for name, one in known.items() if one.default is inspect.Parameter.empty}
    for device in ("meta", "cpu"):
        try:
            made = init(**given, **({"device": device} if "device" in known else {}))
        except Exception:  # noqa: BLE001, S112 - it needs values, a GPU, or other sizes
            continue
        parts = made.values() if made.keys() <= PHASES else (made,)
        return {name: value for part in parts for name, value in part.items()}
    return {}


def main() -> None:
    """Writes the files, and says how many there are and which modules could not be imported."""
    options = PARSER.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lost = import_all(importlib.import_module("flashinfer"))
    logging: Any = importlib.import_module("flashinfer.api_logging")
    written: dict[str, str] = {}
    for function, template, _ in vars(logging)["_TRACE_REGISTRY"]:
        if options.only and template.op_type not in options.only:
            continue
        api = f"{function.__module__}.{function.__qualname__}"
        made = template.build_fi_trace_fn(api)(
            **({} if template.init is None else arguments(template.init)), save_dir=None
        )
        text = json.dumps(made, indent=1)
        if text in written.values():
            continue
        name = made["name"] if made["name"] not in written else f"{made['name']}_{len(written)}"
        written[name] = text
        (options.out / f"{name}.json").write_text(json.dumps({**made, "name": name}, indent=1) + "\n")
    sys.stdout.write(f"{len(written)} definitions in {options.out}\n")
    sys.stderr.write("".join(f"not imported: {one}\n" for one in lost))


if __name__ == "__main__":
    main()

"""Results of the kernel builds that an actor depends on."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from traceproof.stacks.base import Module

RECORDS = "TRACEPROOF_BUILT"  # variable that names the files that say what came of each module


def variables(built: Sequence[Path]) -> dict[str, str]:
    """Environment variables that tell an actor what came of the modules that were built ahead."""
    return {RECORDS: os.pathsep.join(str(path.absolute()) for path in built)}


def failure(modules: Sequence[Module]) -> str | None:
    """Why a definition that needs `modules` can not be run, by the records that builds left; None: it can."""
    paths = [path for path in os.environ.get(RECORDS, "").split(os.pathsep) if path]
    record: dict[str, Any] = {}
    for path in paths:
        record |= json.loads(Path(path).read_text(encoding="utf-8"))
    for module in modules:
        built = record.get(module.label)
        if built is not None and built["status"] != "ok":
            how = f"{built['status']} after {built['seconds']:.0f} s"
            return f"kernel module {module.label}: {how}\n{built['message']}"
    return None

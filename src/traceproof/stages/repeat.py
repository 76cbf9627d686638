"""The command that repeats one case of a run, as it works when it is pasted in the repository's folder.

Standard library only: stacks, which judge, have nothing to read config.yaml with. `traceproof.repeat_options`
says what else of a run's configuration belongs to it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any


def command(row: Mapping[str, Any], further: str) -> str:
    """The command for a verdict row, whose `repeat` has its own options; `further` are those of its run."""
    parts = ["traceproof", "verify", "--definition-name", row["definition"], "--case", row["case"]]
    return " ".join([shlex.join(parts), row["repeat"], *([further] if further else [])])

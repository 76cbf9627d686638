"""The command that repeats one case of a run, as it works when it is pasted in the repository's folder.

Stacks, which judge, have nothing to read config.yaml with. `traceproof.config.repeat_options`
says what else of a run's configuration belongs to it.
"""

import shlex

from traceproof.pipeline.rows import VerdictRow


def command(row: VerdictRow, further: str) -> str:
    """The command for a verdict row, whose `repeat` has its own options; `further` are those of its run."""
    parts = ["traceproof", "verify", "--definition-name", row.definition, "--case", str(row.case)]
    return " ".join([shlex.join(parts), row.repeat, *([further] if further else [])])

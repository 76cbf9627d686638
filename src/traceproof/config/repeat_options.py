"""Options of a repeat command beside its case: what a run's configuration has otherwise than config.yaml."""

import json
import shlex
from pathlib import Path

from traceproof.config.reading import config_of
from traceproof.config.schema import Config
from traceproof.errors import TraceproofError

OWN = frozenset({"selection", "seed", "hidden_seed", "force", "run", "gpu"})  # a row says these itself


def options(config: Config, root: Path) -> str:
    """Options for what a run's configuration has otherwise than config.yaml, for `command`."""
    try:
        written = config_of(root, {})
    except TraceproofError:  # the run was given another file
        return ""
    changed = [key for key in Config.model_fields if getattr(config, key) != getattr(written, key)]
    parts: list[str] = []
    overrides: list[str] = []
    for key in (key for key in changed if key not in OWN):
        value = config.model_dump(mode="json")[key]
        if key == "dataset" and config.dataset.path is not None:
            parts += ["--dataset", str(config.dataset.path)]
        elif key == "test_sizes":
            parts += ["--test-sizes", *config.test_sizes]
        elif key == "allow_weak_isolation" and value:
            parts.append("--allow-weak-isolation")
        elif key == "tolerance" and value is not None:
            parts += ["--tolerance", f"{value:g}"]
        else:
            overrides.append(f"{key}={json.dumps(value)}")
    return shlex.join([*parts, *(["--", "--config", *overrides] if overrides else [])])

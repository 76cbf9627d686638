"""The part of an output's key that says which ground truth it came from: the code it can run, not the version.

So a bump reruns the op_types whose digest changes, and no others.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traceproof.bumps.roots import PACKAGES
from traceproof.bumps.touches import touches
from traceproof.dependents.tree import PackageTree
from traceproof.digests import digest_json

# Found, not imported: importing would need a GPU's libraries.
FIND = (
    "import importlib.util, sys; spec = importlib.util.find_spec(sys.argv[1]); print(spec.origin if spec else '')"
)
DISTRIBUTIONS: Mapping[str, str] = {"flashinfer": "flashinfer-python", "sglang": "sglang", "fla": "fla-core"}


def package_root(python: str, stack: str) -> Path | None:
    """The folder that holds the stack's package in an environment; None: the package is not installed."""
    done = subprocess.run([python, "-P", "-c", FIND, PACKAGES[stack]], check=False, text=True, capture_output=True)
    origin = done.stdout.strip()
    return Path(origin).parent.parent if done.returncode == 0 and origin else None


def source_digests(stack: str, root: Path) -> dict[str, str]:
    """Digest by op_type of what a stack's ground truths can run; `root` holds the package's folder."""
    found = touches(stack, PackageTree(root, PACKAGES[stack]))
    return {op_type: touch.digest for op_type, touch in found.items()}


def keyed(record: Mapping[str, Any], digest: str) -> dict[str, Any]:
    """A stack's record with a digest that names the ground truth's code instead of its version.

    Everything else of the environment still counts: torch, the compilers, the device.
    """
    distribution = DISTRIBUTIONS.get(str(record["stack"]))
    versions = {name: value for name, value in record["versions"].items() if name != distribution}
    rest = {key: value for key, value in record.items() if key not in {"digest", "versions", "sources"}}
    return {**record, "digest": digest_json([rest, versions, digest])}

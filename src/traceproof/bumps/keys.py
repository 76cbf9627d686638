"""The part of an output's key that says which ground truth it came from: the code it can run, not the version.

So a bump reruns the op_types whose digest changes, and no others.
"""

import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from traceproof import programs
from traceproof.actors import interpreted
from traceproof.bumps.source import importable
from traceproof.bumps.touches import touches
from traceproof.checkouts.tree import FolderTree, PackageTree, Tree
from traceproof.digests import digest_json
from traceproof.environments.building import Installation, has_driver, probe, recorded
from traceproof.errors import TraceproofError
from traceproof.pipeline.adapters import op_types
from traceproof.pipeline.sources import OTHER, folder_of
from traceproof.pipeline.stages.stack_workers import OWN_CODE, StackWorkers
from traceproof.stacks import PACKAGES, STACKS
from traceproof.store import SEAL, read_sealed, write_sealed
from traceproof.untrusted.border import BorderError
from traceproof.worker import Isolation, Status
from traceproof.worker.shared import in_run

# Of a stack's record: what its digest does not cover as it is, or at all.
UNKEYED = frozenset({"cache", "cuda_home", "digest", "versions", SEAL})
PROBE = "traceproof.environments.probe:setup"
# Found, not imported: importing would need a GPU's libraries.
FIND = (
    "import importlib.util, sys; spec = importlib.util.find_spec(sys.argv[1]); print(spec.origin if spec else '')"
)


def package_root(python: str, stack: str) -> Path | None:
    """The folder that holds the stack's package in an environment; None: the package is not installed."""
    done = programs.run([python, "-P", "-c", FIND, PACKAGES[stack]])
    origin = done.stdout.strip()
    return Path(origin).parent.parent if done.returncode == 0 and origin else None


def source_digests(stack: str, tree: Tree | None) -> dict[str, str]:
    """Digest by op_type of what a stack's ground truths can run in a tree; nothing where there is none."""
    return {} if tree is None else {op_type: touch.digest for op_type, touch in touches(stack, tree).items()}


def installed(python: str, stack: str) -> Tree | None:
    """The package that is installed in an environment; None: it is not."""
    root = package_root(python, stack)
    return None if root is None else PackageTree(root, PACKAGES[stack])


def keyed(record: Mapping[str, Any], digest: str | None) -> dict[str, Any]:
    """A stack's record with a digest that names the ground truth's code instead of its version.

    Everything else of the environment still counts: torch, the compilers, the device.
    """
    distribution = STACKS[str(record["stack"])].distribution
    versions = {name: value for name, value in record["versions"].items() if name != distribution}
    rest = {key: value for key, value in record.items() if key not in UNKEYED}
    return {**record, "digest": digest_json([rest, versions, digest])}


def write_records(
    folder: Path, record: Mapping[str, Any], sources: Mapping[str, str], op_types: Iterable[str], cache: str | None
) -> list[str]:
    """One record an op_type, `<op_type>.json`; gives the op_types whose digest is new.

    A record with the digest that is there already names the version at which the code became what it is. Its
    `cache` names the folder in which kernels are compiled; op_types share modules, so they share it. None: a new
    one for what is new, and what is the same keeps its own.
    """
    fresh = digest_json([record["digest"], dict(sorted(sources.items()))])
    folder.mkdir(parents=True, exist_ok=True)
    changed = []
    for op_type in op_types:
        path = folder / f"{op_type}.json"
        new = keyed(record, sources.get(op_type)) | {"cache": cache or fresh}
        old = _read(path)
        if old.get("digest") != new["digest"]:
            write_sealed(path, new)
            changed.append(op_type)
            continue
        kept = old | {"cache": cache or old["cache"], "cuda_home": record["cuda_home"]}
        if kept != old:
            write_sealed(path, kept)
    return changed


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_sealed(path)
    except BorderError:
        return {}


def record_stack(stack: Installation, source: str, *, state: str, linked: Path, out: Path) -> None:
    """Write a stack's record; its digest is that of its versions, its device and what its source is.

    The source is `locked`, a folder, or empty for the environment's package; `state` is what it is now. `linked`,
    from where a checkout's package is imported, is written. Raises TraceproofError: the interpreter can not be
    used, or the source holds no such package.
    """
    path = [importable(folder_of(stack.name, source), stack.name, linked)] if source else []
    record = (None if path else _of_worker(stack)) or probe(stack, root=Path.cwd(), path=path)
    digest = digest_json([record["digest"], state]) if source else record["digest"]
    write_sealed(out, {**record, "digest": digest, "cuda_home": stack.cuda_home})


def record_dependencies(stack: Installation, record: Mapping[str, Any], source: str, out: Path) -> None:
    """Digest what each op_type can run, into `out`, and write a record per op_type beside it.

    Raises TraceproofError: the interpreter can not be used.
    """
    checkout = folder_of(stack.name, source) if source else None
    tree = installed(stack.python, stack.name) if checkout is None else FolderTree(checkout)
    sources = source_digests(stack.name, tree)
    # A release compiles everything in a folder of its own; what a checkout leaves the same is not compiled again.
    cache = str(record["digest"]) if checkout is None else None
    changed = write_records(out.parent, record, sources, [*op_types(stack.name), OTHER], cache)
    sys.stderr.write(f"stack      {stack.name:10}  new for {', '.join(changed) or 'no op_type'}\n")
    write_sealed(out, sources)


def _of_worker(stack: Installation) -> dict[str, Any] | None:
    """A stack's record by a worker of this run, whose jobs import torch there anyway; None: there is none to ask.

    Workers without a GPU can not tell which one the machine has.
    """
    if has_driver() or interpreted.asked() or not in_run():
        return None
    with (
        suppress(TraceproofError),  # an interpreter that can not be used: said better by a process of its own
        StackWorkers.on_host().pool(python=Path(stack.python).absolute()) as pool,
    ):
        (outcome,) = pool.run_items(
            setup=PROBE, payload=None, items=[stack.cuda_home], limits=OWN_CODE, isolation=Isolation.TRUSTED
        )
        return recorded(stack, outcome.value) if outcome.status is Status.OK else None
    return None

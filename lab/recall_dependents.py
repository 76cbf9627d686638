r"""Check what `traceproof dependents` finds against what really ran: coverage data of tests, or imports.

    pytest --cov=. --cov-context=test --cov-report=     # in the repository; pytest-cov
    python lab/recall_dependents.py --root xarray-2025.6.1 --coverage .coverage
    PYTHONPATH=<root>:src python lab/recall_dependents.py --root fla_core-0.6.0 --imports fla

With coverage data, a pair is a test file and a file of which a line ran during one of its tests: a change of the
second has to reach the first. With imports, a pair is a module and one that it imported.
"""

from __future__ import annotations

import argparse
import builtins
import importlib
import pkgutil
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from traceproof.checkouts.tree import FolderTree
from traceproof.dependents import Graph

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--root", type=Path, required=True, help="the repository, or an unpacked package")
PARSER.add_argument("--coverage", type=Path, help="data file of coverage.py, with a context per test")
PARSER.add_argument(
    "--imports", metavar="PACKAGE", help="import every module of a package, and note who imports whom"
)
SHOWN = 20
Pairs = Mapping[str, set[str]]


def ran(data_file: Path, root: Path) -> Pairs:
    """Test file -> files of which a line ran while one of its tests did."""
    from coverage import CoverageData  # type: ignore[import-not-found] # where the data was recorded

    data = CoverageData(str(data_file))
    data.read()
    found: dict[str, set[str]] = defaultdict(set)
    for measured in data.measured_files():
        path = Path(measured)
        if not path.is_relative_to(root):
            continue
        name = path.relative_to(root).as_posix()
        for contexts in data.contexts_by_lineno(measured).values():
            for context in filter(None, contexts):  # e.g. xarray/tests/test_utils.py::TestAlias::test|run
                found[context.partition("::")[0]].add(name)
    return found


def imported(package: str, root: Path) -> Pairs:
    """File -> files that an import in it brought in: of the module that it gave, and of those taken from it."""
    found: dict[str, set[str]] = defaultdict(set)
    original = builtins.__import__

    def note(name: str, given=None, local=None, fromlist=(), level=0):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        module = original(name, given, local, fromlist or (), level)
        importer = str((given or {}).get("__file__") or "")
        taken = [getattr(module, one, None) for one in fromlist or ()]
        for one in [module, *taken]:
            file = str(getattr(one, "__file__", None) or "")
            if importer.startswith(f"{root}/") and file.startswith(f"{root}/"):
                found[Path(importer).relative_to(root).as_posix()].add(Path(file).relative_to(root).as_posix())
        return module

    builtins.__import__ = note  # type: ignore[assignment] # a wrapper of looser type
    try:
        top = importlib.import_module(package)
        for info in pkgutil.walk_packages(top.__path__, f"{package}."):
            try:
                importlib.import_module(info.name)
            except Exception as error:  # noqa: BLE001 - what it imported before it failed counts all the same
                sys.stderr.write(f"{info.name}: {type(error).__name__}: {str(error).splitlines()[:1]}\n")
    finally:
        builtins.__import__ = original
    return found


def main() -> int:
    """Exit code 1: a pair was missed."""
    root = options.root.resolve()
    pairs = ran(options.coverage, root) if options.coverage else imported(options.imports, root)
    started = time.perf_counter()
    graph = Graph.of(FolderTree(root))
    took = time.perf_counter() - started
    reached = {name: graph.reach([name]).chains for names in pairs.values() for name in names}
    missed = [
        (user, name)
        for user, names in pairs.items()
        for name in names
        if user != name and user not in reached[name]
    ]
    total = sum(len(names - {user}) for user, names in pairs.items())
    sizes = sorted(sum(path in chains for path in graph.tests) for chains in reached.values())
    out = sys.stdout
    out.write(f"{len(graph.modules.sources)} source files, {len(graph.tests)} test files, graph in {took:.2f} s\n")
    out.write(f"{len(pairs)} files that ran others, {total} pairs, {len(missed)} missed\n")
    if graph.tests and sizes:
        out.write(f"tests reached by a change of one file: median {sizes[len(sizes) // 2]}, most {sizes[-1]}\n")
    out.writelines(f"  missed: {user} needs {name}\n" for user, name in missed[:SHOWN])
    return int(bool(missed) or not pairs)


if __name__ == "__main__":
    options = PARSER.parse_args()
    sys.exit(main())

r"""Check the dependency sets against what is really read: imports, and the headers that nvcc lists.

Run it with an interpreter that has torch (a CPU build will do), the package's own dependencies and nvcc on PATH:

    PYTHONPATH=<unpacked package>:src python lab/recall.py --stack flashinfer --root <unpacked package> \\
        --dataset <dataset>

No GPU is needed: modules are described, preprocessed, and not built.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import cast

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--stack", required=True)
PARSER.add_argument("--root", type=Path, required=True, help="the folder that holds the package")
PARSER.add_argument("--dataset", type=Path, nargs="+", required=True)
PARSER.add_argument("--op-type", nargs="*", default=[])
PARSER.add_argument("--imported", help="internal: list the files that importing these modules opens")
# A module may need another package, a GPU's name, or a file that its maker has to download.
UNDESCRIBED = (ImportError, AttributeError, TypeError, RuntimeError, ValueError, AssertionError, OSError)
CAPABILITIES = ((8, 0), (9, 0), (10, 0))
DEFINES = ["-DFLASHINFER_ENABLE_BF16", "-DFLASHINFER_ENABLE_F16", "-DFLASHINFER_ENABLE_FP8_E4M3"]


def list_imported(stack: str, modules: Iterable[str]) -> None:
    """Print every file that is opened while a stack's modules are imported, in this process."""
    from traceproof.stacks import STACKS

    preparation = STACKS[stack].preparation()
    if preparation is not None:
        preparation()
    opened: list[str] = []
    sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
    for module in modules:
        try:
            importlib.import_module(module)
        except (ImportError, KeyError) as error:
            sys.stderr.write(f"{module}: {type(error).__name__}: {error}\n")
    # What the import system reads goes through C; the modules themselves tell.
    opened += [str(getattr(module, "__file__", "")) for module in list(sys.modules.values())]
    sys.stdout.write("\n".join(sorted(set(opened))) + "\n")


def imported(stack: str, modules: Iterable[str], root: Path) -> set[str]:
    """The package's files that importing modules reads."""
    command = [sys.executable, __file__, "--stack", stack, "--root", str(root), "--dataset", "-"]
    done = subprocess.run(
        [*command, "--imported", ",".join(modules)], check=True, text=True, stdout=subprocess.PIPE
    )
    return below(done.stdout.splitlines(), root)


def below(names: Iterable[str], root: Path) -> set[str]:
    """Paths below the root, relative to it."""
    found = set()
    for name in names:
        path = Path(os.path.normpath(root / name))
        left_out = "__pycache__" in path.parts or ".dist-info" in str(path)
        if path.is_relative_to(root) and path.is_file() and not left_out:
            found.add(path.relative_to(root).as_posix())
    return found


def headers(
    stack: str, op_type: str, datasets: Iterable[Path], reached: Iterable[tuple[str, str]]
) -> dict[str, object]:
    """The modules that the adapters name for the datasets' definitions, and those of the stack's own generators.

    A generator is a function `gen_*` in the set that needs no argument: what a call may compile although no
    adapter names it.
    """
    from traceproof.dataset.definition import Definition
    from traceproof.ops import lookup
    from traceproof.stacks import STACKS

    modules: dict[str, tuple[tuple[str, ...], tuple[object, ...]]] = {}
    for path in sorted(
        path for dataset in datasets for path in (dataset / "definitions" / op_type).glob("*.json")
    ):
        definition = Definition.model_validate_json(path.read_text(encoding="utf-8"))
        adapter = lookup.adapter(stack, definition)
        for capability in CAPABILITIES if adapter else ():
            assert adapter is not None
            for module in adapter.modules(definition, capability):
                if module.compiles:  # nothing describes it but the call that compiles it
                    continue
                modules[module.label] = (STACKS[stack].places(module.generator), module.args)
    for file, name in sorted(reached):
        if name.startswith("gen_") and "." not in name and file.endswith(".py"):
            place = f"{file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}:{name}"
            modules.setdefault(place, ((place,), ()))
    specs = {label: described(label, places, args) for label, (places, args) in modules.items()}
    return {label: spec for label, spec in specs.items() if spec is not None}


@cache
def described(label: str, places: tuple[str, ...], args: tuple[object, ...]) -> object | None:
    """What a module is made of; None: it can not be described here, and stderr says why."""
    import torch

    for place in places:
        name, _, attribute = place.partition(":")
        given = [getattr(torch, a[6:]) if isinstance(a, str) and a.startswith("torch.") else a for a in args]
        try:
            function = getattr(importlib.import_module(name), attribute)
            inspect.signature(function).bind(*given)
        except (ImportError, AttributeError, TypeError):
            continue
        try:
            return cast("object", function(*given))
        except UNDESCRIBED as error:
            sys.stderr.write(f"{label}: {type(error).__name__}: {error}\n")
    return None


def preprocessed(spec: object, root: Path, done: dict[str, set[str]]) -> set[str]:
    """Files that nvcc reads for a module's sources; `done` keeps what it said of each source."""
    import tvm_ffi.libinfo  # type: ignore[import-not-found, unused-ignore] # where the stack is

    from traceproof.stacks import PACKAGES

    data = root / PACKAGES[options.stack] / "data"
    folders = [
        data / "include",
        data / "csrc",
        data / "cutlass" / "include",
        data / "cutlass" / "tools/util/include",
    ]
    folders += [data / "spdlog" / "include", *map(Path, getattr(spec, "extra_include_dirs", None) or [])]
    folders += [data / "cccl" / one for one in ("cub", "thrust", "libcudacxx/include") if (data / "cccl").is_dir()]
    folders += [Path(tvm_ffi.libinfo.find_include_path()), Path(tvm_ffi.libinfo.find_dlpack_include_path())]
    flags = [
        flag for flag in getattr(spec, "extra_cuda_cflags", None) or [] if flag.startswith(("-D", "-gencode"))
    ]
    flags = [flag for flag in flags if not re.search(r"sm_(10[1-9]|11|12)", flag)]
    command = ["nvcc", "-M", "-std=c++17", *DEFINES, *flags, *(f"-I{folder}" for folder in folders)]
    sources = [source for source in map(str, getattr(spec, "sources", [])) if source not in done]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        done.update(zip(sources, threads.map(lambda source: _read(command, source, root), sources), strict=True))
    return set().union(*(done[str(source)] for source in getattr(spec, "sources", [])))


def _read(command: list[str], source: str, root: Path) -> set[str]:
    ran = subprocess.run([*command, source], check=False, text=True, capture_output=True)
    if ran.returncode:
        sys.stderr.write(f"nvcc -M {source}: {ran.stderr.splitlines()[:2]}\n")
        return set()
    return below(ran.stdout.replace("\\\n", " ").split()[1:], root)


def main() -> int:
    """Exit code 1: a file was read that is in no set."""
    from traceproof.bumps.package import Sources
    from traceproof.bumps.roots import roots
    from traceproof.bumps.touches import touch
    from traceproof.checkouts.tree import PackageTree
    from traceproof.pipeline.adapters import op_types
    from traceproof.stacks import PACKAGES

    root = options.root.resolve()
    os.environ.setdefault("FLASHINFER_CUBINS_REPOSITORY", str(root))  # fetch nothing
    sources = Sources(PackageTree(root, PACKAGES[options.stack]), PACKAGES[options.stack])
    missed = 0
    done: dict[str, set[str]] = {}
    for op_type in options.op_type or op_types(options.stack):
        found = touch(options.stack, op_type, sources)
        names = set(found.files)
        modules = sorted({place.partition(":")[0] for place in roots(options.stack, op_type).apis})
        opened = imported(options.stack, modules, root)
        specs = headers(options.stack, op_type, options.dataset, found.reach.units)
        read = set().union(*(preprocessed(spec, root, done) for spec in specs.values()))
        outside = sorted((opened | read) - names)
        missed += len(outside)
        sys.stdout.write(
            f"{op_type:12} set {len(names)}  opened by imports {len(opened)}  modules {len(specs)}"
            f"  read by nvcc {len(read)}  outside the set {len(outside)} {outside[:5]}\n"
        )
        sys.stdout.flush()
    unread = sum(not files for files in done.values())
    sys.stdout.write(f"{len(done)} sources through nvcc -M, {unread} of which it could not read\n")
    return int(missed > 0)


if __name__ == "__main__":
    options = PARSER.parse_args()
    if options.imported is not None:
        list_imported(options.stack, filter(None, options.imported.split(",")))
        sys.exit(0)
    sys.exit(main())

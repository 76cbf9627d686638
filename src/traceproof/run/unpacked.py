"""A solution's files in the process of strangers' code: unpacked, built, the entry point found.

Part of what runs beside `traceproof.run.runner`: standard library and torch only.
"""

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from traceproof.run.caches import FOLDER

COMPILED = (".cu", ".cpp", ".cc", ".cxx")
UNPACKED_AT = 1_000_000_000  # seconds: before any build, so that no source looks newer than its library
# Of CUTLASS, in a package such as FlashInfer.
HEADERS = ("data/cutlass/include", "data/cutlass/tools/util/include")
JOBS = "4"  # compilers at once: the worker may have few processes
BOUND = re.compile(r"\b(PYBIND11_MODULE|TORCH_LIBRARY|TVM_FFI_DLL_EXPORT_TYPED_FUNC)\b")


def load(solution: Mapping[str, Any], name: str, scratch: Path) -> Callable[..., Any]:
    """The function to call of a solution: `files`, text by path; `entry`, `<file>::<function>`; `binding`."""
    folder = scratch / name
    for path, text in solution["files"].items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(target, text)
    file, _, function = solution["entry"].partition("::")
    if file.endswith(COMPILED):
        out = scratch / FOLDER / name
        return _built(folder, out, file, function, str(solution["binding"]))
    sys.dont_write_bytecode = True
    sys.path[:0] = [str((folder / file).parent), str(folder)]
    spec = importlib.util.spec_from_file_location(name, folder / file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    found: Callable[..., Any] = getattr(module, function)
    return found


def _write(target: Path, text: str) -> None:
    target.write_text(text, encoding="utf-8")
    os.utime(target, (UNPACKED_AT, UNPACKED_AT))


def _built(folder: Path, out: Path, file: str, function: str, binding: str) -> Callable[..., Any]:
    """Compile a solution into `out`, where that has not been done, and find its entry point.

    nvcc and ninja are found as PyTorch finds them.
    """
    name = out.name
    out.mkdir(parents=True, exist_ok=True)
    os.environ["MAX_JOBS"] = JOBS
    sources = sorted(str(path) for path in folder.rglob("*") if path.suffix in COMPILED)
    include = [str(folder), *_headers()]
    if binding == "tvm-ffi":
        cpp = importlib.import_module("tvm_ffi.cpp")
        kinds = {"cuda_files": [one for one in sources if one.endswith(".cu")]}
        kinds["cpp_files"] = [one for one in sources if not one.endswith(".cu")]
        module = cpp.load(name=name, build_directory=str(out), extra_include_paths=include, **kinds)
        return module[function]  # type: ignore[no-any-return]
    if not any(BOUND.search(Path(one).read_text(encoding="utf-8")) for one in sources):
        text = (folder / file).read_text(encoding="utf-8")
        binding_code = f'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{ m.def("{function}", &{function}); }}'
        _write(folder / file, f"{text}\n{binding_code}\n")
    extension = importlib.import_module("torch.utils.cpp_extension")
    module = extension.load(
        name=name, sources=sources, extra_include_paths=include, build_directory=str(out), verbose=False
    )
    return getattr(module, function)  # type: ignore[no-any-return]


def _headers() -> list[str]:
    """Folders of headers that installed packages bring; found without importing these."""
    packages = [Path(place) for place in sys.path if place]
    return [str(found) for place in packages for name in HEADERS for found in sorted(place.glob(f"*/{name}"))]

"""CUDA toolkit folder of an environment: its compiler's wheels in the layout that kernel packages expect.

`python -m traceproof.environments.toolkit` makes it in the environment of its interpreter. FlashInfer, SGLang and
tvm-ffi look for `bin/nvcc`, `include`, `lib64/libcudart.so` and `lib64/stubs/libcuda.so` below CUDA_HOME. The
wheels have neither lib64 nor the names that a linker looks for, nor a stub of the driver's library.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from traceproof.errors import TraceproofError

FOLDER = "cuda"  # in the environment
WHEELS = "nvidia/cu*/bin/nvcc"  # in its packages; a folder per major version of CUDA
STUB = "libcuda.so"  # to link against; the driver has libcuda.so.1
RELEASE = re.compile(r"\bV(\d+(?:\.\d+)+)")  # as `nvcc --version` ends: `release 13.0, V13.0.88`
FUNCTION = re.compile(r"\bcu[A-Z]\w*")  # in cuda.h, as is the next:
VERSION = re.compile(r"^#define CUDA_VERSION (\d+)", re.MULTILINE)
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
GET_VERSION = "cuDriverGetVersion"


def compose(prefix: Path, packages: Path) -> Path | None:
    """Make `prefix`/cuda from the wheels in `packages`, replacing an old one; None: there is no compiler in them.

    Raises TraceproofError: there is no C compiler, without which kernels can not be built either.
    """
    compilers = sorted(packages.glob(WHEELS))
    if not compilers:
        return None
    wheels = compilers[-1].parent.parent
    with tempfile.TemporaryDirectory(prefix=f".{FOLDER}-", dir=prefix) as scratch:
        toolkit = Path(scratch) / FOLDER
        toolkit.mkdir()
        for name in ("bin", "include", "nvvm"):
            (toolkit / name).symlink_to(os.path.relpath(wheels / name, prefix / FOLDER))
        libraries = toolkit / "lib64"
        (libraries / "stubs").mkdir(parents=True)
        # `libx.so.13` serves as `libx.so` too, the name that a linker looks for.
        files = sorted(path for path in (wheels / "lib").iterdir() if path.is_file())
        names = {path.name.partition(".so")[0] + ".so": path for path in files if ".so." in path.name}
        for name, path in (names | {path.name: path for path in files}).items():
            (libraries / name).symlink_to(os.path.relpath(path, prefix / FOLDER / "lib64"))
        (toolkit / "lib").symlink_to("lib64")
        compile_stub(wheels / "include" / "cuda.h", libraries / "stubs" / STUB)
        final = prefix / FOLDER
        shutil.rmtree(final, ignore_errors=True)
        toolkit.rename(final)
    return final


def home(configured: str = "", *, python: str = "") -> Path | None:
    """The toolkit for builds of interpreter `python` ("": this one): the configured, else its environment's."""
    if configured:
        return Path(configured).expanduser()
    composed = (Path(python).absolute().parents[1] if python else Path(sys.prefix)) / FOLDER
    return composed if (composed / "bin" / "nvcc").exists() else None


def release(toolkit: Path) -> str:
    """Version of a toolkit's compiler. Raises TraceproofError: it has none that runs."""
    nvcc = toolkit / "bin" / "nvcc"
    try:
        done = subprocess.run([nvcc, "--version"], check=True, text=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise TraceproofError(
            f"{toolkit} is no CUDA toolkit: {nvcc} can not be run ({error})",
            todo="config.yaml's stacks.<name>.cuda_home names the folder that has bin/nvcc; null takes the "
            "compiler that the stack's pins install.",
        ) from error
    named = RELEASE.search(done.stdout)
    return named[1] if named else done.stdout.strip()


def compile_stub(header: Path, library: Path) -> None:
    """Compile a library with the driver's name and functions, for machines without a driver.

    Modules are linked against it, and packages that open the driver can be imported with it: it has the headers'
    version and finds no device. Raises TraceproofError: there is no C compiler.
    """
    text = header.read_text(encoding="utf-8")
    version = VERSION.search(text)
    functions = set(FUNCTION.findall(text)) - {GET_VERSION}
    source = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in sorted(functions))
    source += f"int {GET_VERSION}(int *version) {{ *version = {version[1] if version else 0}; return 0; }}\n"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{STUB}.1", "-x", "c", "-", "-o", str(library)]
    try:
        subprocess.run([*compiler, *flags], check=True, text=True, capture_output=True, input=source)
    except (OSError, subprocess.CalledProcessError) as error:
        raise TraceproofError(
            f"no C compiler: {compiler[0]} can not be used",
            problems=[str(getattr(error, "stderr", "") or error)],
            todo="Install a C++ compiler (Debian and Ubuntu: apt install g++), or name one in CC and CXX.",
        ) from error


if __name__ == "__main__":
    composed = compose(Path(sys.prefix), Path(sysconfig.get_paths()["purelib"]))
    sys.stdout.write(f"{composed or 'the environment has no CUDA compiler'}\n")

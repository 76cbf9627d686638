"""A stack compiles with the compiler that its pins install, whatever toolkit the machine has."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest

from traceproof.config import Config
from traceproof.environments import toolkit
from traceproof.environments.building import Installation, recorded, resolve
from traceproof.environments.inside import record as by_this_process
from traceproof.errors import TraceproofError
from traceproof.run import jit
from traceproof.stacks import Module

RECORD = {"stack": "flashinfer", "digest": "d" * 32}
NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"
HEADER = (
    "#define CUDA_VERSION 13000\nCUresult CUDAAPI cuInit(unsigned int Flags);\n#define cuMemAlloc cuMemAlloc_v2\n"
)
needs_c_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def program(path: Path, text: str) -> Path:
    """A script at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Packages with the compiler's wheels among them."""
    wheels = tmp_path / "env" / "lib" / "site-packages" / "nvidia" / "cu13"
    program(wheels / "bin" / "nvcc", NVCC)
    for name, text in (("include/cuda.h", HEADER), ("nvvm/bin/cicc", ""), ("lib/libcudart.so.13", "runtime")):
        (wheels / name).parent.mkdir(parents=True, exist_ok=True)
        (wheels / name).write_text(text)
    return wheels.parent.parent


@needs_c_compiler
def test_wheels_become_a_toolkit(tmp_path: Path, packages: Path) -> None:
    for _ in range(2):  # the second time in place of the first
        made = toolkit.compose(tmp_path / "env", packages)
    assert made == tmp_path / "env" / "cuda"
    assert all((made / name).exists() for name in ("bin/nvcc", "include/cuda.h", "nvvm/bin/cicc"))
    for folder in ("lib", "lib64"):
        assert {(made / folder / name).read_text() for name in ("libcudart.so", "libcudart.so.13")} == {"runtime"}
    assert toolkit.release(made) == "13.0.88"
    assert sorted(path.name for path in (tmp_path / "env").iterdir()) == ["cuda", "lib"]


@needs_c_compiler
def test_the_drivers_library_can_be_linked_against_where_there_is_none(tmp_path: Path, packages: Path) -> None:
    made = toolkit.compose(tmp_path / "env", packages)
    assert made is not None
    stub = made / "lib64" / "stubs" / "libcuda.so"
    library = ctypes.CDLL(str(stub))
    assert all(hasattr(library, name) for name in ("cuInit", "cuMemAlloc", "cuMemAlloc_v2"))
    version = ctypes.c_int()
    assert (library.cuInit(0), library.cuDriverGetVersion(ctypes.byref(version))) == (toolkit.NO_DEVICE, 0)
    assert version.value == 13000
    assert b"libcuda.so.1\0" in stub.read_bytes()  # what is linked against it asks for the driver's


def test_without_a_c_compiler_the_environment_says_what_to_install(
    tmp_path: Path, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    with pytest.raises(TraceproofError, match="no C compiler") as caught:
        toolkit.compose(tmp_path / "env", packages)
    assert "apt install g++" in caught.value.todo
    assert not (tmp_path / "env" / "cuda").exists()


def test_builds_use_the_environments_toolkit_and_not_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda")
    assert jit.environment(tmp_path, RECORD)["CUDA_HOME"] == "/usr/local/cuda"  # an interpreter without one
    program(tmp_path / "cuda" / "bin" / "nvcc", NVCC)
    found = jit.environment(tmp_path, RECORD)
    assert found["CUDA_HOME"] == found["CUDA_PATH"] == str(tmp_path / "cuda")


def test_a_configured_toolkit_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    program(tmp_path / "cuda" / "bin" / "nvcc", NVCC)
    chosen = {"dataset": "anywhere", "stacks": {"sglang": {"python": "/opt/python", "cuda_home": "/opt/cuda"}}}
    stack = resolve(Config.model_validate(chosen), "sglang")
    assert stack == Installation("sglang", None, "/opt/python", "/opt/cuda")
    record = {**RECORD, "cuda_home": stack.cuda_home}
    assert jit.environment(tmp_path, record)["CUDA_HOME"] == "/opt/cuda"


def test_a_stack_is_known_by_the_release_of_its_compiler(tmp_path: Path) -> None:
    stack = Installation("flashinfer", None, sys.executable, str(tmp_path))
    compiler = program(tmp_path / "bin" / "nvcc", NVCC)
    found = recorded(stack, by_this_process(str(tmp_path)))
    program(compiler, NVCC.replace("88", "96"))
    other = recorded(stack, by_this_process(str(tmp_path)))
    assert (found["compiler"], other["compiler"]) == ("13.0.88", "13.0.96")
    assert found["digest"] != other["digest"]


def test_builders_find_the_stacks_own_programs_first(tmp_path: Path) -> None:
    fake = program(tmp_path / "python", '#!/bin/sh\necho "$PATH"; exit 1\n')
    marks = tmp_path / "built"
    problem = jit.build(
        "flashinfer",
        Module("gen_norm"),
        python=str(fake),
        variables={},
        marks=marks,
        seconds=30.0,
        stopped=threading.Event(),
    )
    assert problem is not None
    assert problem.partition("\n")[2] == os.pathsep.join([str(tmp_path), os.environ["PATH"]])

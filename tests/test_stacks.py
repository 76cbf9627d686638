"""Which environment a stack has, how it is built and locked; its compiler, and what that builds."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import pytest

from traceproof.config import Config
from traceproof.dataset.tree import read_definition
from traceproof.environments import building as environments
from traceproof.environments import jit, toolkit
from traceproof.environments.building import Installation, build, probe, ready, recorded, resolve
from traceproof.environments.inside import record as by_this_process
from traceproof.errors import TraceproofError
from traceproof.ops import lookup
from traceproof.ops.families.gdn import PREFILL_SM90
from traceproof.reasons import UnavailableError
from traceproof.run.workers import Environment
from traceproof.stacks import LIBRARIES, STACKS, Module, flashinfer

ROOT = Path(__file__).resolve().parent.parent
LOCKED = ("uv.lock", *(f"envs/{path.name}" for path in sorted((ROOT / "envs").glob("*.txt"))))
# The lock has a form of its own; the others take torch from a file that is not the registry's.
UNHASHED = {"uv.lock", "envs/cpu.txt", "envs/extract.txt"}
PUBLIC = {"https://pypi.org", "https://files.pythonhosted.org"}


def config(**torch: str) -> Config:
    return Config.model_validate({"dataset": "anywhere", "stacks": {"torch": torch}})


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says that there is an NVIDIA driver; it does not exist yet."""
    path = tmp_path / "nvidiactl"
    monkeypatch.setattr(environments, "CUDA_DRIVER", (path,))
    return path


@pytest.mark.parametrize(
    ("name", "wanted", "present", "environment"),
    [
        ("torch", "auto", False, "cpu"),
        ("torch", "auto", True, "torch"),
        ("torch", "cpu", True, "cpu"),
        ("torch", "cuda", False, "torch"),
        ("flashinfer", "auto", False, "cpu"),  # nothing is built for a ground truth that could not run
        ("flashinfer", "auto", True, "flashinfer"),
    ],
)
def test_a_stack_runs_where_the_configuration_and_the_machine_say(
    driver: Path, name: str, wanted: str, environment: str, *, present: bool
) -> None:
    if present:
        driver.touch()
    assert resolve(config(env=wanted), name) == Installation(name, environment, f".venvs/{environment}/bin/python")
    given = config(python="/opt/python")
    assert resolve(given, "torch") == Installation("torch", None, "/opt/python")


def test_what_the_shipped_lock_says_is_what_is_judged() -> None:
    assert environments.unlike_the_lock(config(), root=ROOT) == {}


@pytest.mark.parametrize(
    ("pin", "pinned"),
    [
        ({"package": "flashinfer-python", "version": "0.6.13"}, "flashinfer-python 0.6.13"),
        ({"url": "https://example.org/x", "commit": "a" * 40}, "commit aaaaaaaaaaaa"),
    ],
)
def test_another_pin_is_said_unless_its_source_is_chosen(tmp_path: Path, pin: dict[str, str], pinned: str) -> None:
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "flashinfer.txt").write_text("torch==2.13.0\nflashinfer-python==0.7.2.post1 ; x \\\n")
    (tmp_path / "sources.lock").write_text(json.dumps({"sources": {"flashinfer": pin}}))
    (told,) = environments.unlike_the_lock(config(), root=tmp_path).values()
    assert f"sources.lock pins flashinfer at {pinned}, and what is judged is flashinfer-python 0.7.2.post1" in told
    assert "`source: locked` below stacks.flashinfer" in told
    for chosen in ({"source": "locked"}, {"python": "/opt/python"}):
        given = Config.model_validate({"dataset": "anywhere", "stacks": {"flashinfer": chosen}})
        assert environments.unlike_the_lock(given, root=tmp_path) == {}
    without = Config.model_validate({"dataset": "anywhere", "truths": ["torch"]})
    assert environments.unlike_the_lock(without, root=tmp_path) == {}


@pytest.mark.slow
def test_a_probe_says_what_keys_outputs_and_nothing_of_the_machine() -> None:
    here = Installation("torch", None, forked.interpreter())
    found = probe(here, root=ROOT)
    assert found["versions"]["torch"]
    assert found["device_type"] in {"cpu", "cuda"}
    assert recorded(here, by_this_process()) == found
    host = re.compile(rf"\b{re.escape(os.uname().nodename)}\b")
    assert not [value for value in map(str, found.values()) if os.sep in value or host.search(value)]


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
def test_an_interpreter_that_cannot_be_used_says_so(python: str) -> None:
    with pytest.raises(TraceproofError, match="the stack 'torch' can not be used") as caught:
        probe(Installation("torch", None, python), root=ROOT)
    assert "has to name a Python with torch" in caught.value.todo


@pytest.mark.slow
def test_an_environment_that_cannot_be_had_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "fla.txt").write_text(f"no-such-package==1.0 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setenv("UV_OFFLINE", "1")
    with pytest.raises(TraceproofError, match="the environment 'fla' could not be built") as caught:
        build("fla", tmp_path / "stamp.json", root=tmp_path)
    assert "no-such-package" in str(caught.value)
    assert not (tmp_path / "stamp.json").exists()


def test_an_environment_is_built_once_per_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    said: list[str] = []
    monkeypatch.setattr(environments, "_run", lambda _, name: made.append(name))
    pins = tmp_path / "envs" / "fla.txt"
    pins.parent.mkdir()
    stack = Installation("fla", "fla", ".venvs/fla/bin/python")
    steps = ("first==1\n", "first==1\n", "first==2\n", "first==2\n")
    counts, lock = [], tmp_path / ".venvs" / "fla.lock"
    for step, text in enumerate(steps):
        pins.write_text(text)
        if step == 3:  # nothing is to be built, so that no lock can be missed, as in a folder that is read-only
            lock.unlink(missing_ok=True)
            lock.mkdir()
        assert ready(stack, root=tmp_path, say=said.append) == tmp_path / stack.python
        counts.append(len(made) // 2)  # an environment, then its packages
    assert counts == [1, 1, 2, 2]
    assert ["once" in said[0], "its pins changed" in said[1], len(said)] == [True, True, 2]


def test_the_exported_pins_agree_with_the_lock() -> None:
    command = [sys.executable, str(ROOT / "envs" / "lock.py"), "--check"]
    done = subprocess.run(command, check=False, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", LOCKED)
def test_a_lock_names_public_hosts_only(name: str) -> None:
    text = (ROOT / name).read_text()
    assert set(re.findall(r"https?://[^/\"\s]+", text)) <= PUBLIC
    assert "file:" not in text


@pytest.mark.parametrize("name", [name for name in LOCKED if name not in UNHASHED])
def test_every_pin_has_a_hash(name: str) -> None:
    entries = re.split(r"\n(?=\S)", (ROOT / name).read_text().strip())[1:]
    assert entries
    assert not [entry for entry in entries if "--hash=sha256:" not in entry]


def test_no_environment_of_the_driver_holds_torch() -> None:
    assert not re.search(r"^torch==", (ROOT / "envs" / "driver.txt").read_text(), re.MULTILINE)


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
def test_wheels_become_a_toolkit_with_a_driver_to_link_against(tmp_path: Path, packages: Path) -> None:
    for _ in range(2):  # the second time in place of the first
        made = toolkit.compose(tmp_path / "env", packages)
    assert made is not None
    assert made == tmp_path / "env" / "cuda"
    assert all((made / name).exists() for name in ("bin/nvcc", "include/cuda.h", "nvvm/bin/cicc"))
    for folder in ("lib", "lib64"):
        assert {(made / folder / name).read_text() for name in ("libcudart.so", "libcudart.so.13")} == {"runtime"}
    assert toolkit.release(made) == "13.0.88"
    assert sorted(path.name for path in (tmp_path / "env").iterdir()) == ["cuda", "lib"]
    stub = made / "lib64" / "stubs" / "libcuda.so"
    library = ctypes.CDLL(str(stub))
    assert all(hasattr(library, name) for name in ("cuInit", "cuMemAlloc", "cuMemAlloc_v2"))
    version = ctypes.c_int()
    assert (library.cuInit(0), library.cuDriverGetVersion(ctypes.byref(version))) == (toolkit.NO_DEVICE, 0)
    assert version.value == 13000
    assert b"libcuda.so.1\0" in stub.read_bytes()  # what is linked against it asks for the driver's


def test_a_missing_c_compiler_is_told(tmp_path: Path, packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    with pytest.raises(TraceproofError, match="no C compiler") as caught:
        toolkit.compose(tmp_path / "env", packages)
    assert "apt install g++" in caught.value.todo
    assert not (tmp_path / "env" / "cuda").exists()


def test_builds_use_the_environments_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda")
    assert jit.environment(tmp_path, RECORD)["CUDA_HOME"] == "/usr/local/cuda"  # an interpreter without one
    program(tmp_path / "cuda" / "bin" / "nvcc", NVCC)
    found = jit.environment(tmp_path, RECORD)
    assert found["CUDA_HOME"] == found["CUDA_PATH"] == str(tmp_path / "cuda")
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
    where: dict[str, Any] = {"python": str(fake), "variables": {}, "marks": marks}
    problem = jit.build("flashinfer", Module("gen_norm"), **where, seconds=300.0, stopped=threading.Event())
    assert problem is not None
    assert problem.partition("\n")[2] == os.pathsep.join([str(tmp_path), os.environ["PATH"]])


def test_a_worker_compiles_with_the_compiler_of_its_own_environment(tmp_path: Path) -> None:
    program(tmp_path / "cuda" / "bin" / "nvcc", NVCC)
    record = {**RECORD, "device_type": "cuda"}
    told = Environment(name="flashinfer", python=str(tmp_path / "bin" / "python"), record=record).told(tmp_path)
    assert told["CUDA_HOME"] == told["CUDA_PATH"] == str(tmp_path / "cuda")


def test_what_hangs_on_one_long_file_starts_first() -> None:
    order = sorted(
        map(Module, ("gen_decode", "gen_sampling", "gen_prefill")),
        key=lambda one: jit.urgency(STACKS["flashinfer"], one),
        reverse=True,
    )
    assert [module.generator for module in order] == ["gen_sampling", "gen_prefill", "gen_decode"]


def modules_of(path: str) -> list[Module]:
    """What FlashInfer builds for a test definition on Hopper."""
    definition = read_definition(Path(__file__).parent / "dataset/definitions" / f"{path}.json").definition
    return jit.modules_for("flashinfer", definition, jit.HOPPER)


COMPILED_IN_CALLS = {  # FlashInfer's ground truths on Hopper that compile in their first call, none for minutes
    "cudnn.cudnn_batch_prefill_with_kv_cache",
    "cutlass_fused_moe",
    "decode.single_decode_with_kv_cache",
    "flashinfer.activation.gelu_and_mul",
    "flashinfer.activation.gelu_tanh_and_mul",
    "flashinfer.activation.silu_and_mul",
    "fused_moe.alphamoe_sm100.alphamoe_interleave_gated_weights",
    "fused_topk_deepseek",
    "gemm.bmm_fp8",
    "nvfp4_kv_dequantize_paged",
    "prefill.single_prefill_with_kv_cache",
    "top_k_varlen",
    "xqa.xqa",
}


def test_ground_truths_whose_kernels_are_not_built_ahead_are_listed() -> None:
    found = set()
    for path in (Path(__file__).parent / "dataset" / "definitions").glob("*/*.json"):
        definition = read_definition(path).definition
        adapter = lookup.adapter("flashinfer", definition)
        runs = adapter is not None and adapter.runs_on(jit.HOPPER)
        if adapter is not None and runs and not jit.modules_for("flashinfer", definition, jit.HOPPER):
            found.add(adapter.name)
    assert found == COMPILED_IN_CALLS


def test_kernels_that_take_minutes_are_built_before_their_calls() -> None:
    [product] = modules_of("gemm_fp8/blockscale_gemm_n256_k384")
    assert jit.urgency(STACKS["flashinfer"], product) > jit.urgency(STACKS["flashinfer"], Module("gen_sampling"))
    [packed] = modules_of("trtllm_paged/trtllm_fmha_packed_h3_d32")
    assert packed.label == "fmha_v2-PACKED_QKV-bfloat16"
    names = [f"fmha_64_256_S_qkv_32_{kind}output_bf16" for kind in ("", "alibi_", "softmax_skipSoftmax_")]
    assert [bool(re.search(packed.unused or "", name)) for name in names] == [False, True, True]


def built(folder: Path, module: Module, script: str, seconds: float = 300.0) -> str | None:
    """What comes of a module whose builder is a script."""
    fake = folder / "python"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    where: dict[str, Any] = {"python": str(fake), "variables": {}, "marks": folder / "built"}
    return jit.build("flashinfer", module, **where, seconds=seconds, stopped=threading.Event())


@pytest.mark.parametrize(("generator", "nice"), [("gen_sampling", 0), ("gen_norm", jit.OTHERS_NICE)])
def test_the_others_give_way(generator: str, nice: int, tmp_path: Path) -> None:
    problem = built(tmp_path, Module(generator, (), "_b$"), 'echo "$3"; exit 1')
    assert problem is not None
    order = {"stack": "flashinfer", "generator": generator, "args": [], "compiles": False, "nice": nice}
    assert json.loads(problem.partition("\n")[2]) == order | {"unused": "_b$"}


@dataclass
class Described:
    """A package's description of a module, as far as the builder reads it."""

    sources: list[Path]
    extra_ldflags: list[str] | None = None


def test_sources_that_nothing_calls_are_left_out() -> None:
    whole = Described([Path(f"mask_{mask}.cu") for mask in range(3)])
    part = jit._without(whole, r"_[02]$")
    assert part == Described([Path("mask_1.cu")], ["-Wl,-z,lazy"])
    assert jit._without(whole, None) is jit._without(whole, "elsewhere") is whole


def test_the_delta_rule_is_built_for_the_calls_that_are_made() -> None:
    options = list(itertools.product("01", repeat=5))
    names = [f"gdn_prefill_kernel_bf16_g{g}b{b}a{a}i{i}c{c}" for g, b, a, i, c in options]
    sources = [Path(f"{name}.cu") for name in [*names, "gdn_prefill_launcher", "prefill_kernel_delta_rule_sm90"]]
    left = jit._without(Described(sources), PREFILL_SM90.unused).sources
    kept = {"gdn_prefill_kernel_bf16_g0b1a1i1c0", "gdn_prefill_kernel_bf16_g1b1a1i1c0"}
    assert {source.stem for source in left} == kept | {"gdn_prefill_launcher", "prefill_kernel_delta_rule_sm90"}


def test_workers_load_what_was_built_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "build.so"
    library.write_bytes(b"built")
    libraries = Path(jit.environment(tmp_path, {"digest": "d" * 32})[LIBRARIES])
    jit._hand_over("norm", library, libraries)
    assert [path.name for path in libraries.rglob("*") if path.is_file()] == ["norm.so"]
    environment = types.ModuleType("flashinfer.jit.env")
    for name in ("flashinfer", "flashinfer.jit"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flashinfer.jit.env", environment)
    monkeypatch.setenv("FLASHINFER_USE_CUDA_NORM", "1")
    monkeypatch.setenv(LIBRARIES, str(libraries))
    flashinfer.prepare()
    assert (environment.FLASHINFER_AOT_DIR / "norm" / "norm.so").read_bytes() == b"built"


def test_a_kernel_that_no_network_gives_is_absent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loader: Any = types.ModuleType(flashinfer.LOADER)
    loader.FLASHINFER_CUBINS_REPOSITORY = "https://kernels.invalid/artifacts"
    for name in ("flashinfer", "flashinfer.jit"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, flashinfer.LOADER, loader)
    monkeypatch.setenv("FLASHINFER_USE_CUDA_NORM", "1")
    flashinfer.prepare()
    with pytest.raises(UnavailableError, match=r"from kernels\.invalid, which is not reached"):
        loader.time.sleep(60.0)
    loader.FLASHINFER_CUBINS_REPOSITORY = "https://localhost/artifacts"
    loader.time.sleep(0.0)


def test_memory_bounds_what_is_built_at_once() -> None:
    assert jit.side_by_side(4 * jit.BUILD_BYTES, 16) == 4
    assert jit.side_by_side(100 * jit.BUILD_BYTES, 16) == 16
    assert jit.side_by_side(0, 16) == 1


@pytest.mark.parametrize(
    ("script", "seconds", "how"), [("echo said; exit 1", 300.0, "failed"), ("exec sleep 60", 0.2, "timeout")]
)
def test_a_bad_build_says_how_it_ended(script: str, seconds: float, how: str, tmp_path: Path) -> None:
    problem = built(tmp_path, Module("gen_norm"), script, seconds)
    assert problem is not None
    assert problem.startswith(f"kernel module norm: {how} after ")
    assert ("said" in problem) == (how == "failed")


def test_what_is_built_is_not_built_again(tmp_path: Path) -> None:
    count = tmp_path / "count"
    for _ in range(2):
        assert built(tmp_path, Module("gen_norm"), f"echo >> {count}") is None
    assert count.read_text() == "\n"


def test_workers_compile_with_the_builders_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/opt/gcc")
    monkeypatch.delenv("CXX", raising=False)
    variables = jit.environment(tmp_path, {"digest": "d" * 32})
    assert variables["CC"] == "/opt/gcc"
    assert "CXX" not in variables

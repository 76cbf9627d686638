"""Calls of solutions: compiled once, in workers that leave nothing, between fences."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from solution_judge import SolutionJudge, candidate
from worker_pools import NAMESPACES

from traceproof.ops.cases import Case
from traceproof.reasons import Error, Failure, Verdict
from traceproof.run import runner
from traceproof.run.case import solve
from traceproof.run.runner import FENCED_BEFORE, FENCED_BEHIND, FOLDER
from traceproof.run.untrusted import CallError
from traceproof.run.workers import untrusted_pool
from traceproof.sandbox import MIB, Reply, Status
from traceproof.sandbox.isolation import HOLDS
from traceproof.sandbox.model import TRITON
from traceproof.solutions.judging import compile_launcher
from traceproof.solutions.properties import CHANNELS, chosen
from traceproof.solutions.reading import Candidate
from traceproof.solutions.trial import CompiledFiles, SolutionRun, left_behind

pytestmark = pytest.mark.usefixtures("one_thread")
NAME = "rmsnorm_h96"
NORM = """def run(x, weight):
    y = x.float()
    return (y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.float()).to(x.dtype)
"""
# The nanoseconds at which the library was written, eight bits per element, which bfloat16 holds exactly.
STAMP = """def run(x, weight):
    import os
    written = os.stat(LIBRARY).st_mtime_ns
    return x.new_tensor([written >> 8 * place & 255 for place in range(7)])
"""
# Python's own interface compiles in a second, PyTorch's in a minute.
CPP = """// PYBIND11_MODULE is not needed here
#include <Python.h>
#include <dlfcn.h>
#define JOIN(a, b) a##b
#define INIT(name) JOIN(PyInit_, name)
#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

static PyObject *run(PyObject *, PyObject *given) {
  Dl_info here;
  dladdr(reinterpret_cast<void *>(&run), &here);
  PyObject *names = PyDict_New();
  PyDict_SetItemString(names, "__builtins__", PyEval_GetBuiltins());
  PyDict_SetItemString(names, "LIBRARY", PyUnicode_FromString(here.dli_fname));
  PyRun_String(R"(SOURCE)", Py_file_input, names, names);
  return PyObject_CallObject(PyDict_GetItemString(names, "run"), given);
}

static PyMethodDef methods[] = {{"run", run, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, TEXT(TORCH_EXTENSION_NAME), nullptr, -1, methods};

PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)(void) { return PyModule_Create(&module); }
"""


def compiled(text: str) -> Candidate:
    """A solution in C++ that returns its output."""
    return Candidate(
        name="compiled",
        path="main.cpp",
        language="cpp",
        entry="main.cpp::run",
        destinations=False,
        files={"main.cpp": text},
    )


def test_a_compiled_solution_is_accepted(judge: SolutionJudge) -> None:
    assert judge.reasons(compiled(CPP.replace("SOURCE", NORM)), NAME) == []


def test_a_compiled_solution_is_accepted_in_a_container_without_namespaces(judge: SolutionJudge) -> None:
    with untrusted_pool() as pool:
        pool.without = NAMESPACES
        assert replace(judge, pool=pool).reasons(compiled(CPP.replace("SOURCE", NORM)), NAME) == []


@pytest.mark.parametrize("apart", [True, False])
def test_it_is_compiled_once_for_all_of_its_workers(judge: SolutionJudge, *, apart: bool) -> None:
    definition, cases = judge.planned(NAME)
    solution = compiled(CPP.replace("SOURCE", STAMP))
    stamps = []
    with SolutionRun.of(definition, solution, judge.settings, judge.pool) as ready:
        assert ready.compiled is not None
        assert ready.compiled.apart == (judge.pool.layers()["files"] == HOLDS)
        run = replace(ready, compiled=replace(ready.compiled, apart=apart and ready.compiled.apart))
        first = next(row for row in run.rows(cases) if row.verdict is not Verdict.SKIP)
        assert first.seed not in {case.case.seed for case in cases}
        subject = run.subject(cases[0].case)
        for _ in range(2):
            with run.source() as source:
                stamps.append(run.call(source, subject).outputs["output"])
    assert torch.equal(*stamps)
    assert torch.count_nonzero(stamps[0]) > 1


def test_what_does_not_compile_is_refused_once_in_the_compilers_words(judge: SolutionJudge) -> None:
    trial = judge.trial(compiled("// PYBIND11_MODULE\n#error no such luck\n"), NAME)
    [row] = trial.rows
    assert row.reason == Error.EXCEPTION
    assert "no such luck" in row.message


def test_a_worker_finds_what_the_first_compiled_and_nothing_that_another_left() -> None:
    with CompiledFiles.new() as files:
        with files.restored() as scratch:
            library = scratch / FOLDER / "kernels" / "one.so"
            library.parent.mkdir(parents=True)
            library.write_text("library", encoding="utf-8")
            os.utime(library, (1, 2))
            (scratch / FOLDER / "passwords").symlink_to("/etc/passwd")
            (scratch / FOLDER / "etc").symlink_to("/etc")
            os.mkfifo(scratch / FOLDER / "pipe")
            (scratch / ".cache").symlink_to("/etc")
            (scratch / "answer").write_text("5", encoding="utf-8")
            files.keep(scratch, MIB)
        for _ in range(2):
            with files.restored() as again:
                assert again == scratch
                assert _listed(again) == [f"{FOLDER}/kernels/one.so"]
                assert (again / FOLDER / "kernels" / "one.so").stat().st_mtime == 2
                (again / FOLDER / "answer").write_text("6", encoding="utf-8")
                (again / "link").symlink_to("/etc")
                (again / "folder").mkdir()


def test_compiled_files_that_can_not_be_copied_are_compiled_again() -> None:
    with CompiledFiles.new() as files:
        with files.restored() as scratch:
            (scratch / FOLDER).mkdir()
            deepest = os.open(scratch / FOLDER, os.O_RDONLY)
            for _ in range(1200):
                os.mkdir("d", dir_fd=deepest)
                deeper = os.open("d", os.O_RDONLY, dir_fd=deepest)
                os.close(deepest)
                deepest = deeper
            os.close(deepest)
            files.keep(scratch, MIB)
        assert _listed(files.kept) == []
        with files.restored() as scratch:
            assert _listed(scratch) == []


def test_files_with_holes_count_by_their_size() -> None:
    with CompiledFiles.new() as files, files.restored() as scratch:
        (scratch / FOLDER).mkdir()
        for name in ("a", "b"):
            (scratch / FOLDER / name).touch()
            os.truncate(scratch / FOLDER / name, 3 * MIB)
        files.keep(scratch, 5 * MIB)
        assert _listed(files.kept) == []


def _listed(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
PACKAGE = "SOME_PACKAGE_WORKSPACE_BASE"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shared"
    whole, partial = folder / "WHOLE", folder / "PARTIAL"
    for kernel in (whole, partial):
        kernel.mkdir(parents=True)
        (kernel / "kernel.cubin").write_bytes(b"machine code")
    (whole / "__grp__kernel.json").write_text("{}")
    (folder / "LAUNCHER").mkdir()
    (folder / "LAUNCHER" / "cuda_utils.so").touch()
    monkeypatch.setenv(TRITON, str(folder))
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "inductor"))
    monkeypatch.setenv(PACKAGE, str(tmp_path / "package"))
    return folder


def test_a_worker_compiles_below_its_scratch_folder(shared: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    runner.use_own(scratch)
    for name in (TRITON, INDUCTOR, PACKAGE):
        own = Path(os.environ[name])
        assert own.is_relative_to(scratch)
        (own / "NEW").mkdir()
    assert sorted(path.name for path in shared.iterdir()) == ["LAUNCHER", "PARTIAL", "WHOLE"]


def test_whole_kernels_of_trusted_code_are_found_and_partial_ones_are_not(shared: Path, tmp_path: Path) -> None:
    runner.use_own(tmp_path / "scratch")
    own = Path(os.environ[TRITON])
    assert (own / "WHOLE" / "kernel.cubin").read_bytes() == b"machine code"
    assert (own / "LAUNCHER" / "cuda_utils.so").exists()
    assert not (own / "PARTIAL").exists()
    assert [*untrusted_pool(environment={TRITON: str(shared)}).readable] == [shared]


def test_what_launches_kernels_of_triton_is_compiled_once(tmp_path: Path) -> None:
    package = tmp_path / "triton" / "backends" / "nvidia"
    package.mkdir(parents=True)
    made = "import os, pathlib\n\n\ndef CudaUtils():\n    made = pathlib.Path(os.environ['TRITON_CACHE_DIR'])\n"
    (package / "driver.py").write_text(f"{made}    (made / 'KEY' / 'cuda_utils.so').touch()\n")
    (tmp_path / "KEY").mkdir()
    for _ in range(2):  # the second time it would fail
        compile_launcher({TRITON: str(tmp_path), "PYTHONPATH": str(tmp_path)})
        (package / "driver.py").unlink(missing_ok=True)
    assert (tmp_path / "KEY" / "cuda_utils.so").exists()


def test_a_worker_without_compilers_needs_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in filter(runner.PLACES.search, list(os.environ)):
        monkeypatch.delenv(name)
    runner.use_own(tmp_path)
    assert not list(tmp_path.iterdir())
    assert [*untrusted_pool().readable] == []


CASE = Case(id="small-1", size="small", axes={"batch_size": 7}, seed=0)


SOURCE = """
import os


def run(hidden_states, weight):
    return hidden_states * 0 + float(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "0"))
"""


@pytest.mark.parametrize("channels", [None, CHANNELS])
def test_a_process_may_have_more_channels_to_a_gpu(channels: int | None, judge: SolutionJudge) -> None:
    definition, cases = judge.planned("rmsnorm_h96")
    subject = solve(definition, next(case.case for case in cases if case.id == "small-0"))
    solution = candidate("one", SOURCE)
    with (
        SolutionRun.of(definition, solution, judge.settings, judge.pool) as run,
        run.source(channels=channels) as source,
    ):
        (output,) = run.call(source, subject).outputs.values()
    assert isinstance(output, torch.Tensor)
    assert bool((output == (channels or 0)).all())


@pytest.mark.parametrize(
    ("message", "left"),
    [
        ("torch.AcceleratorError: CUDA error: capturing stream has unjoined work\nCompile with ...", True),
        ("torch.AcceleratorError: CUDA error: operation not permitted when stream is capturing", False),
    ],
)
def test_a_capture_tells_work_that_is_left_from_what_can_not_be_captured(message: str, *, left: bool) -> None:
    row = left_behind(CASE, CallError(Reply(status=Status.ERROR, message=message)), "graph")
    assert (row is not None) is left
    if row is not None:
        assert (row.verdict, row.reason, row.variant) == (Verdict.FAIL, Failure.LATE, "graph")


BETWEEN = """import ctypes
import torch

def run(hidden_states, weight{more}):
    x = hidden_states.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.float()
    {new}
    output.copy_(y)
    end = {of}.data_ptr() + {of}.numel() * {of}.element_size()
    {act}
    {back}
"""
READ, WRITE = "ctypes.string_at({}, 64)", "ctypes.memset({}, 0, 64)"
PLACES = {"before": "{of}.data_ptr() - 64", "behind": "end + 64"}
OWN = {"more": "", "new": "output = torch.empty_like(hidden_states)", "back": "return output"}
GIVEN = {"more": ", output", "new": "pass", "back": "pass"}


def ended(judge: SolutionJudge, text: str) -> dict[str, str]:
    """How the calls with fences end, by where the fence is near; nothing: as they should."""
    definition, cases = judge.planned("rmsnorm_h96")
    solution = candidate("norm", text).settled(definition)
    base = chosen(cases)
    assert base is not None
    subject, found = solve(definition, base.case), {}
    with SolutionRun.of(definition, solution, judge.settings, judge.pool) as run, run.source() as source:
        for how in (FENCED_BEFORE, FENCED_BEHIND):
            try:
                taken = run.call(source, subject, how=how)
            except CallError as error:
                found[how] = error.told
            else:
                assert not [row for row in run.rule(subject, taken) if row.bad]
    return found


@pytest.mark.parametrize("form", [OWN, GIVEN], ids=["own", "given"])
def test_a_kernel_that_stays_inside_is_right_between_fences(form: dict[str, str], judge: SolutionJudge) -> None:
    assert ended(judge, BETWEEN.format(of="output", act="pass", **form)) == {}


@pytest.mark.parametrize("act", [READ, WRITE], ids=["read", "write"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("of", ["hidden_states", "weight", "output"])
@pytest.mark.parametrize("form", [OWN, GIVEN], ids=["own", "given"])
def test_outside_it_ends(form: dict[str, str], of: str, where: str, act: str, judge: SolutionJudge) -> None:
    place = PLACES[where].format(of=of)
    found = ended(judge, BETWEEN.format(of=of, act=act.format(place), **form))
    assert "SIGSEGV" in found[FENCED_BEFORE if where == "before" else FENCED_BEHIND]


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("assert weight.shape == hidden_states.shape[-1:]", "holds"),
        ("weight = torch.nn.functional.pad(weight, (0, hidden_states.shape[-1] - len(weight)))", "broken"),
        ("hidden_states = hidden_states.view(torch.bfloat16)", "broken"),
    ],
)
def test_ruled_out_inputs_are_refused_by_the_kernel_or_told(line: str, state: str, judge: SolutionJudge) -> None:
    text = BETWEEN.format(of="output", act="pass", **OWN).replace("    x =", f"    {line}\n    x =")
    trial = judge.trial(candidate("norm", text), "rmsnorm_h96", only=["small-1"])
    [found] = [one for one in trial.properties if one.name == "errors"]
    assert (found.state, found.bad) == (state, False), found.detail


DECODE = """import torch


def run(q, k, v, sm_scale):
    assert q.shape[-1] == v.shape[-1]
    {}
    ratio = q.shape[0] // k.shape[1]
    keys, values = (one.float().repeat_interleave(ratio, dim=1) for one in (k, v))
    logits = torch.einsum("hd,lhd->hl", q.float(), keys) * sm_scale
    return torch.einsum("hl,lhd->hd", torch.softmax(logits, dim=-1), values).to(q.dtype)
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("assert q.shape[-1] == k.shape[-1] == v.shape[-1] == 64", ""),
        ("assert q.dtype == torch.bfloat16 and q.shape[-1] == k.shape[-1] == v.shape[-1]", ""),
        (
            "q, k, v = (torch.nn.functional.pad(x, (0, 64 - v.shape[-1] & 8)) for x in (q, k, v))",
            "head_dim of 56 in q, k, v, no multiple of 16: it neither raises nor is right",
        ),
    ],
)
def test_another_head_size_is_refused_computed_or_told(line: str, said: str, judge: SolutionJudge) -> None:
    trial = judge.trial(candidate("decode", DECODE.format(line)), "single_decode_h4_kv2_d64", only=["small-0"])
    [found] = [one for one in trial.properties if one.name == "errors"]
    assert said in found.detail, found.detail
    assert (found.state == "broken") == bool(said), found.detail


def test_sizes_that_no_oracle_computes_are_told(judge: SolutionJudge) -> None:
    text = "import torch\n\n\ndef run(input):\n"
    text += "    gate, up = torch.nn.functional.pad(input, (0, -input.shape[-1] % 2)).float().chunk(2, -1)\n"
    text += "    return (torch.nn.functional.silu(gate) * up).to(input.dtype)\n"
    trial = judge.trial(candidate("silu", text), "silu_and_mul_d96", only=["small-0"])
    [found] = [one for one in trial.properties if one.name == "errors"]
    assert found.state == "broken"
    assert found.detail == "the last axis of input one short: it neither raises nor is right"

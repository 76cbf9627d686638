"""Planted faults of a GPU kernel, 40: reads and writes beside tensors, left-out ends, races; needs CUDA.

Each is a right norm with one mistake, in Triton, in CUDA compiled by NVRTC, or in PyTorch. The right ones are
accepted; a last test counts what of the faults was refused where each is called alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from solution_judge import LIMITS, SolutionJudge, candidate, solution_judge

from traceproof.run.calls import FENCE, Fences, GpuPages
from traceproof.run.runner import FENCED_BEFORE, FENCED_BEHIND, LOAD, LOAD_ON_PART
from traceproof.run.untrusted import CallError
from traceproof.solutions.properties import CHANNELS, chosen
from traceproof.solutions.trial import SolutionRun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NAME = "rmsnorm_h96"
TRITON = """import torch
import triton
import triton.language as tl


@triton.jit
def _norm(x_ptr, w_ptr, y_ptr, rows, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < columns
    summed = mask
    x = tl.load(x_ptr + row * columns + at, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32)
    count = columns
    ACT
    y = x * tl.rsqrt(tl.sum(tl.where(summed, x * x, 0.0), axis=0) / count + eps) * w
    THEN
    tl.store(y_ptr + row * columns + at, y.to(tl.bfloat16), mask=mask)


def run(hidden_states, weightMORE):
    NEW
    rows, columns = hidden_states.shape
    if rows:
        _norm[(rows,)](hidden_states, weight, output, rows, columns, 1e-5, BLOCK=triton.next_power_of_2(columns))
    BACK
"""
CUDA = """import torch

SOURCE = r'''
__device__ float wide(unsigned short v) { return __uint_as_float((unsigned)v << 16); }
__device__ unsigned short narrow(float v) {
  unsigned u = __float_as_uint(v);
  return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
typedef unsigned short half_word;
extern "C" __global__ void norm_rows(const half_word *x, const half_word *w, half_word *y, int rows, int columns) {
  const long long row = blockIdx.x, start = row * columns;
  float total = 0.f;
  for (int i = threadIdx.x; i < columns; i += 32) total += wide(x[start + i]) * wide(x[start + i]);
  for (int step = 16; step; step >>= 1) total += __shfl_xor_sync(~0u, total, step);
  const float scale = rsqrtf(total / columns + 1e-5f);
  if (threadIdx.x == 0 && row == WHO) { ACT }
  for (int i = threadIdx.x; i < columns; i += 32) y[start + i] = narrow(wide(x[start + i]) * scale * wide(w[i]));
}
'''
NORM = torch.cuda._compile_kernel(SOURCE, "norm_rows")


def run(hidden_states, weight):
    output = torch.empty_like(hidden_states)
    rows, columns = hidden_states.shape
    if rows:
        NORM(grid=(rows, 1, 1), block=(32, 1, 1), args=[hidden_states, weight, output, rows, columns])
    return output
"""
OWN = {"MORE": "", "NEW": "output = torch.empty_like(hidden_states)", "BACK": "return output"}
GIVEN = {"MORE": ", output", "NEW": "pass", "BACK": "pass"}
WHO = ("0", "rows / 2", "rows - 1")  # the program that does it: the first, the middle, the last
ENDS = {"x": "rows * columns", "w": "columns", "y": "rows * columns"}
PYTORCH = """import torch

SIDE = torch.cuda.Stream()


def norm(hidden_states, weight):
    x = hidden_states.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.float()).to(hidden_states.dtype)


def run(hidden_states, weight):
    main = torch.cuda.current_stream()
"""


def written(template: str, changes: Mapping[str, str]) -> str:
    for place, text in changes.items():
        template = template.replace(place, text)
    return template


def in_triton(*, act: str = "pass", then: str = "pass", form: Mapping[str, str] = OWN) -> str:
    return written(TRITON, {"ACT": act.replace("\n", "\n    "), "THEN": then.replace("\n", "\n    "), **form})


def in_pytorch(*lines: str) -> str:
    return PYTORCH + "".join(f"    {line}\n" for line in lines)


def beside() -> Iterator[tuple[str, str, str]]:
    """Faults of bounds: a name, where the fence is near, the source."""
    who = cycle(WHO)
    for of, end in ENDS.items():
        for where, place, how in (("before", "-1", FENCED_BEFORE), ("behind", end, FENCED_BEHIND)):
            for act in ("read", "write"):
                one = next(who)
                if act == "read":
                    text = f"if row == {one.replace('/', '//')}:\n    near = tl.load({of}_ptr + {place})\n"
                    text += "    w = tl.where(near.to(tl.float32) == 8192.0, w + 1.0, w)"
                    cuda = f"if (((const volatile unsigned short *){of})[{place}] == 0x1234) total += 1.f;"
                else:
                    text = f"if row == {one.replace('/', '//')}:\n    tl.store({of}_ptr + {place}, 0.0)"
                    cuda = f"((volatile unsigned short *){of})[{place}] = 0;"
                yield f"triton-{act}-{where}-{of}", how, in_triton(act=text)
                yield f"cuda-{act}-{where}-{of}", how, written(CUDA, {"WHO": one, "ACT": cuda})
                if of == "y":
                    yield f"triton-{act}-{where}-given", how, in_triton(act=text, form=GIVEN)


BESIDE = {name: (how, source) for name, how, source in beside()}
# What of the triton kernel is wrong at an end, a tile's border or in the middle.
BOUNDARIES = {
    "last-column": in_triton(act="summed = at < columns - 1\ncount = columns - 1"),
    "first-column": in_triton(act="summed = mask & (at > 0)"),
    "before-a-tile": in_triton(act="summed = mask & (at != 63)"),
    "behind-a-tile": in_triton(act="summed = mask & (at != 64)"),
    "first-row": in_triton(then="y = tl.where(row == 0, y * 1.02, y)"),
    "last-row": in_triton(then="mask = mask & ((row < 2) | (row < rows - 1))"),
    "row-behind-a-tile": in_triton(then="y = tl.where(row == 16, y * 1.02, y)"),
    "middle-column": in_triton(then="y = tl.where(at == columns // 2, 0.0, y)"),
}
RACES = {
    "another-stream": in_pytorch(
        "SIDE.wait_stream(main)",
        "with torch.cuda.stream(SIDE):",
        "    y = norm(hidden_states, weight)",
        "torch.cuda._sleep(100_000)",
        "return y.clone()",
    ),
    "event-too-early": in_pytorch(
        "SIDE.wait_stream(main)",
        "with torch.cuda.stream(SIDE):",
        "    event = SIDE.record_event()",
        "    y = norm(hidden_states, weight)",
        "main.wait_event(event)",
        "torch.cuda._sleep(100_000)",
        "return y.clone()",
    ),
    "copy-nobody-waits-for": in_pytorch(
        "x = hidden_states.float()",
        "scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)",
        "host = torch.empty(scale.shape, pin_memory=True)",
        "host.copy_(scale, non_blocking=True)",
        "for _ in range(3000):",
        "    pass",
        "kept = host.clone()",
        "return (x * kept.to(x.device) * weight.float()).to(hidden_states.dtype)",
    ),
    "memory-used-again": in_pytorch(
        "held = hidden_states.clone()",
        "y = torch.empty_like(held)",
        "SIDE.wait_stream(main)",
        "with torch.cuda.stream(SIDE):",
        "    y.copy_(norm(held, weight))",
        "del held",
        "torch.zeros_like(hidden_states)  # lies where it lay",
        "torch.cuda._sleep(100_000)",
        "main.wait_stream(SIDE)",
        "return y",
    ),
}


def needs_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SolutionJudge]:
    environment = {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    limits = replace(LIMITS, seconds=60.0, setup_seconds=120.0, memory_bytes=10 << 30)
    with solution_judge(
        tmp_path_factory.mktemp("judging"), gpu=True, environment=environment, limits=limits
    ) as found:
        yield found


def ended(judge: SolutionJudge, text: str, *hows: str, channels: int | None = None) -> dict[str, str]:
    """What is wrong with calls of the case that properties take, by how they are made; nothing: they are right."""
    definition, cases = judge.planned(NAME)
    solution = candidate("norm", text).settled(definition)
    found: dict[str, str] = {}
    with SolutionRun.of(definition, solution, judge.settings, judge.pool) as ready:
        base = chosen(cases)
        assert base is not None
        subject = ready.subject(base.case)
        with ready.source(channels=channels) as source:
            for how in hows:
                try:
                    taken = ready.call(source, subject, how=how)
                except CallError as error:
                    found[how] = error.told
                else:
                    wrong = [row for row in ready.rule(subject, taken) if row.bad]
                    found |= {how: f"{wrong[0].reason}: {wrong[0].message}"} if wrong else {}
    return found


RIGHT = {
    "triton": in_triton(),
    "triton-given": in_triton(form=GIVEN),
    "cuda": written(CUDA, {"WHO": "0", "ACT": ""}),
}
RIGHT["pytorch"] = in_pytorch("return norm(hidden_states, weight)")


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_is_right_between_fences_and_beside_other_work(name: str, judge: SolutionJudge) -> None:
    needs_triton()
    assert ended(judge, RIGHT[name], FENCED_BEFORE, FENCED_BEHIND) == {}
    assert ended(judge, RIGHT[name], "", LOAD, channels=CHANNELS) == {}


def test_a_right_kernel_is_right_on_a_part_of_the_multiprocessors(judge: SolutionJudge) -> None:
    found = ended(judge, RIGHT["pytorch"], "", LOAD_ON_PART, channels=CHANNELS)
    if found.keys() == {LOAD_ON_PART}:
        pytest.skip(found[LOAD_ON_PART])  # which PyTorch or the driver can not set apart
    assert found == {}


@pytest.mark.parametrize("name", BESIDE)
def test_what_lies_beside_a_tensor_is_not_touched(name: str, judge: SolutionJudge) -> None:
    needs_triton()
    how, source = BESIDE[name]
    found = ended(judge, source, how)
    print(f"{name}: {found}")  # noqa: T201 - how each was seen
    assert how in found
    assert "compil" not in found[how]


@pytest.mark.parametrize("name", BOUNDARIES)
def test_a_boundary_that_is_left_out_is_refused(name: str, judge: SolutionJudge) -> None:
    needs_triton()
    trial = judge.trial(candidate("norm", BOUNDARIES[name]), NAME, whole=False)
    assert judge.reasons_of(trial, NAME)


@pytest.mark.parametrize("name", RACES)
def test_a_race_shows_beside_other_work(name: str, judge: SolutionJudge) -> None:
    tries = (ended(judge, RACES[name], "", LOAD, channels=CHANNELS) for _ in range(5))
    found = next(filter(None, tries), {})  # a host that other processes keep busy may be later than the GPU
    print(f"{name}: {found}")  # noqa: T201 - how each was seen
    assert found


def test_there_are_as_many_faults_as_there_should_be() -> None:
    assert len(BESIDE) + len(BOUNDARIES) + len(RACES) == 40


@pytest.mark.parametrize("at_end", [False, True])
def test_pages_of_a_gpu_lie_where_they_should_and_are_given_back(*, at_end: bool) -> None:
    fences = Fences(at_end=at_end)
    value = fences.around(torch.arange(15, dtype=torch.int16, device="cuda").view(3, 5))
    assert torch.equal(value.cpu().flatten(), torch.arange(15, dtype=torch.int16))
    value += 1
    room = torch.empty(0, dtype=torch.uint8, device="cuda").set_(value.untyped_storage())
    assert len(room) % (2 << 20) == 0, "no pages of virtual memory here: canaries alone"
    assert value.data_ptr() - room.data_ptr() == (len(room) - 64 if at_end else 0)
    assert not fences.crossed
    room[min(len(room) - 1, value.data_ptr() - room.data_ptr() + FENCE // 2 if not at_end else len(room) - 1)] ^= 1
    assert fences.crossed
    del fences, value, room
    assert GpuPages.dead
    torch.cuda.synchronize()
    GpuPages.sweep()
    assert not GpuPages.dead

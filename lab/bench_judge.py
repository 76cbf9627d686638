"""How long `traceproof judge` takes, part by part, of right kernels and wrong ones; on a CPU of those in PyTorch.

    python lab/bench_judge.py --dataset results/dataset/flashinfer-bench-... [--only NAME ...] [--repeat 2]

Each is judged by a process of its own, as the command does it, with this interpreter's packages, and once more by
the same process, as the command does it with a folder of solutions. What a solution compiles is not kept for the
next one. Parts called `property ...` go on beside the cases. `--cpu`: as on a machine without a GPU; `taskset -c
0,1` in front gives it two cores.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from traceproof.solutions.judging import Judge, new_hidden_seed, target_of
from traceproof.solutions.reading import read
from traceproof.solutions.records import JudgeSettings

say = partial(print, flush=True)  # a line, at once
DRIVER = Path("/dev/nvidiactl")
SOLUTIONS = Path(__file__).parents[1] / "tests" / "gpu" / "solutions"
NORM, GEMM, DECODE = "rmsnorm_h4096", "gemm_n4096_k4096", "gqa_paged_decode_h32_kv8_d128_ps1"
TORCH_NORM = """import torch


def run(hidden_states, weight):
    x = hidden_states.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return (y * weight.float()).to(hidden_states.dtype)
"""
TORCH_GEMM = (SOLUTIONS / "gemm_torch.py").read_text(encoding="utf-8")
TORCH_DECODE = """import torch


def run(q, k_cache, v_cache, kv_indptr, kv_indices, sm_scale):
    rows, heads, width = q.shape
    group = heads // k_cache.shape[2]
    output = torch.zeros_like(q)
    lse = torch.full((rows, heads), -float("inf"), device=q.device)
    ends = kv_indptr.tolist()
    for row in range(rows):
        at = kv_indices[ends[row] : ends[row + 1]].long()
        if not len(at):
            continue
        k = k_cache[at, 0].float().repeat_interleave(group, 1)
        v = v_cache[at, 0].float().repeat_interleave(group, 1)
        logits = torch.einsum("hd,khd->hk", q[row].float(), k) * sm_scale
        lse[row] = torch.logsumexp(logits, -1) * 1.4426950408889634
        output[row] = torch.einsum("hk,khd->hd", torch.softmax(logits, -1), v).to(q.dtype)
    return output, lse
"""
TRITON_DECODE = """import torch
import triton
import triton.language as tl


@triton.jit
def _decode(q_ptr, k_ptr, v_ptr, ends_ptr, at_ptr, scale, o_ptr, lse_ptr, HEADS: tl.constexpr, KV: tl.constexpr,
            WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(ends_ptr + row), tl.load(ends_ptr + row + 1)
    d = tl.arange(0, WIDTH)
    q = tl.load(q_ptr + (row * HEADS + head) * WIDTH + d).to(tl.float32) * (scale * 1.4426950408889634)
    most, total, sums = -float("inf"), 0.0, tl.zeros((WIDTH,), dtype=tl.float32)
    for first in range(start, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        there = place < end
        page = tl.load(at_ptr + place, mask=there, other=0).to(tl.int64)
        near = (page * KV + head // (HEADS // KV))[:, None] * WIDTH + d[None, :]
        k = tl.load(k_ptr + near, mask=there[:, None], other=0.0).to(tl.float32)
        v = tl.load(v_ptr + near, mask=there[:, None], other=0.0).to(tl.float32)
        logits = tl.where(there, tl.sum(q[None, :] * k, axis=1), -float("inf"))
        top = tl.maximum(most, tl.max(logits, axis=0))
        kept, weights = tl.exp2(most - top), tl.exp2(logits - top)
        total = total * kept + tl.sum(weights, axis=0)
        sums = sums * kept + tl.sum(weights[:, None] * v, axis=0)
        most = top
    some = ~(total == 0)  # NaN too
    tl.store(o_ptr + (row * HEADS + head) * WIDTH + d, tl.where(some, sums / total, 0.0).to(tl.bfloat16))
    tl.store(lse_ptr + row * HEADS + head, tl.where(some, most + tl.log2(total), -float("inf")))


def run(q, k_cache, v_cache, kv_indptr, kv_indices, sm_scale):
    rows, heads, width = q.shape
    output, lse = torch.empty_like(q), torch.empty((rows, heads), device=q.device)
    if rows:
        _decode[(rows, heads)](q, k_cache, v_cache, kv_indptr, kv_indices, sm_scale, output, lse, HEADS=heads,
                               KV=k_cache.shape[2], WIDTH=width, BLOCK=64)
    return output, lse
"""
# name: (definition, file's name, text, whether it is right)
KERNELS = {
    "norm": (NORM, "norm.py", TORCH_NORM, True),
    "norm_triton": (NORM, "norm.py", (SOLUTIONS / "rmsnorm_triton.py").read_text(encoding="utf-8"), True),
    "gemm": (GEMM, "gemm.py", TORCH_GEMM, True),
    "decode_triton": (DECODE, "decode.py", TRITON_DECODE, True),
    "norm_cuda": (NORM, "norm.cu", (SOLUTIONS / "rmsnorm_cuda.cu").read_text(encoding="utf-8"), True),
    "wrong_norm": (NORM, "norm.py", TORCH_NORM.replace("1e-5", "1e-3"), False),
    "wrong_gemm": (GEMM, "gemm.py", TORCH_GEMM.replace("A @ B.T", "(A @ B.T) * 1.02"), False),
    "wrong_decode": (DECODE, "decode.py", TORCH_DECODE.replace("* sm_scale", "* (sm_scale * 1.02)"), False),
}
BESIDE = "property "  # how parts begin that go on beside others
ON_CPU = ("norm", "wrong_norm", "wrong_gemm", "wrong_decode")


def one(name: str, dataset: Path, out: Path, *, gpu: bool, once: bool) -> int:
    """Judge one in this process, once or twice by the same judging process, and write what came of it."""
    definition, file, text, right = KERNELS[name]
    words: list[float] = []
    turns: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Judge(lambda _: words.append(time.monotonic())) as judge,
        target_of(definition, dataset) as target,
    ):
        place = Path(folder)
        (place / file).write_text(text, encoding="utf-8")
        [candidate] = read(place / file)
        for _ in range(1 if once else 2):
            own = {"conceal": (folder,), "caches": f"{place}/compiled", "gpu": gpu, "weak": True}
            settings = JudgeSettings.model_validate({"hidden_seed": new_hidden_seed(), **own})
            begun = time.monotonic()
            certificate = judge.judged(candidate, target, settings, repeat="")
            ended = time.monotonic()
            told, words[:] = [begun, *words, ended], []
            turns.append(
                {
                    "as_expected": certificate.accepted is right,
                    "headline": certificate.headline,
                    "reasons": certificate.reasons,
                    "rows": len(certificate.rows),
                    "seconds": certificate.seconds,
                    "silent": max(after - before for before, after in pairwise(told)),
                    "wall": ended - begun,
                }
            )
    processor = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    out.write_text(json.dumps({"turns": turns, "processor": processor}), encoding="utf-8")
    return 0


def table(name: str, turn: int, dataset: Path, options: Sequence[str]) -> bool:
    """Have one judged, and print its times; gives whether the verdicts are the expected ones."""
    with tempfile.TemporaryDirectory() as folder:
        out, begun = Path(folder, "found.json"), time.monotonic()
        command = [sys.executable, __file__, "--dataset", str(dataset), "--one", name, "--out", str(out), *options]
        code = subprocess.run(command, check=False).returncode
        wall = time.monotonic() - begun
        if code or not out.is_file():
            say(f"{name} {turn}: NOT JUDGED after {wall:.1f} s, exit code {code}")
            return False
        found = json.loads(out.read_text(encoding="utf-8"))
    first, *others = found["turns"]
    again: dict[str, Any] = others[0] if others else {"wall": 0.0, "seconds": {}}
    alone = wall - again["wall"]
    wrong = [one for one in (first, *others) if not one["as_expected"]]
    verdict = f"UNEXPECTED {wrong[0]['reasons'][:3]}" if wrong else "as expected"
    told = f"again by the same process {again['wall']:.2f} s, " if others else ""
    say(f"\n{name} {turn}: {alone:.2f} s, {told}{verdict}")
    say(f"  {first['headline']}; {first['rows']} rows, longest silence {first['silent']:.1f} s")
    say(f"  {found['processor']:.1f} processor seconds, of all processes but untrusted ones")
    own = alone - sum(seconds for what, seconds in first["seconds"].items() if not what.startswith(BESIDE))
    for what, seconds in {**first["seconds"], "start and end": own}.items():
        say(f"  {what:32} {seconds:8.2f} {again['seconds'].get(what, 0.0):8.2f}")
    return not wrong


def main() -> int:
    """The table; exit code 1 if a verdict is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, required=True, help="the folder that holds the snapshot")
    parser.add_argument("--only", nargs="+", choices=KERNELS, help="these alone")
    parser.add_argument("--repeat", type=int, default=1, help="how often each is judged, in turns")
    parser.add_argument("--once", action="store_true", help="not again by the same process")
    parser.add_argument("--cpu", action="store_true", help="as without a GPU")
    parser.add_argument("--one", choices=KERNELS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    dataset = options.dataset.resolve()
    gpu = DRIVER.exists() and not options.cpu
    if options.one:
        return one(options.one, dataset, options.out, gpu=gpu, once=options.once)
    names = options.only or (KERNELS if gpu else ON_CPU)
    more = [f"--{name}" for name in ("cpu", "once") if getattr(options, name)]
    found = [table(name, turn, dataset, more) for turn in range(options.repeat) for name in names]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Measure what tensor cores lose in attention logits of some 60,000, and find the arithmetic. Needs torch and a GPU; Triton if there.

Queries and keys are drawn as the stress cases draw them. Logits of bfloat16 products with float32 sums, by cuBLAS and by Triton's
`tl.dot` in blocks of 64 (of 64 rows: wgmma on Hopper; of 16: mma), are held against float64. For each, a model that reproduces its
bits is searched: products of a group and the sum so far are cut off (toward zero) `bits` below the largest of them, added, and
the sum is cut off to float32. Last, log-sum-exp and output in float64 from those logits, over the error of traceproof's baseline.
"""

import itertools
import math

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

torch.backends.cuda.matmul.allow_tf32 = False
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
QUERIES, KEYS, RAW = 128, 64, 60000.0
HEADS = 16  # queries of a row of the log-sum-exp
WIDTHS = {128: (128, 1 / math.sqrt(128)), 192: (128, 1 / math.sqrt(192)), 576: (512, 1 / math.sqrt(192))}  # values' width, scale
PATTERNS = {"above": (1, 1.0), "below": (-1, 1.0), "deep": (-1, 0.0)}  # sign of products; deep: 60,000 in base 2 after the scale
GROUPS, BITS = (4, 8, 16, 32), (23, 24, 25, 26, 27)


def draw(width, pattern):
    """Queries [Q, D], keys [K, D], values [K, Dv], softmax scale."""
    values, scale = WIDTHS[width]
    sign, raw = PATTERNS[pattern]
    product = RAW if raw else RAW * math.log(2) / scale
    amplitude = math.sqrt(product / (2 / math.pi * width))
    generator = torch.Generator().manual_seed(width)
    normal = lambda rows, columns: torch.randn(rows, columns, generator=generator)  # noqa: E731
    q, k = (amplitude * normal(QUERIES, width)).abs(), sign * (amplitude * normal(KEYS, width)).abs()
    return q.to(BF16), k.to(BF16), normal(KEYS, values).to(BF16), float(torch.tensor(scale, dtype=F32))


def with_cublas(q, k):
    return torch.mm(q, k.T, out_dtype=F32) if DEVICE == "cuda" else (q.float() @ k.float().T)


if triton:

    @triton.jit
    def dot(q, k, out, width: tl.constexpr, keys: tl.constexpr, rows: tl.constexpr, step: tl.constexpr):
        row, column, inner = tl.program_id(0) * rows + tl.arange(0, rows), tl.arange(0, keys), tl.arange(0, step)
        total = tl.zeros((rows, keys), dtype=tl.float32)
        for first in range(0, width, step):
            a = tl.load(q + row[:, None] * width + first + inner[None, :])
            b = tl.load(k + column[None, :] * width + first + inner[:, None])
            total = tl.dot(a, b, total)
        tl.store(out + row[:, None] * keys + column[None, :], total)


def with_triton(rows):
    """Logits by Triton in blocks of so many queries."""

    def call(q, k):
        out = torch.empty(QUERIES, KEYS, device=q.device, dtype=F32)
        dot[(QUERIES // rows,)](q, k, out, q.shape[1], KEYS, rows, 64)
        return out

    return call


def power(exponents):
    """2 to whole numbers, exactly, whatever a GPU's exp2 does."""
    return (exponents.to(torch.int64) + 1023 << 52).view(F64)


def cut(x, unit):
    return torch.trunc(x / unit) * unit


def model(q, k, group, bits):
    """Logits of the arithmetic to be found: see the module's text. Exponents of products are sums of the factors' exponents."""
    exponents = lambda x: torch.frexp(x.double()).exponent.to(F64) - 1  # noqa: E731
    products = q.double()[:, None] * k.double()[None]
    sizes = exponents(q)[:, None] + exponents(k)[None]
    total = torch.zeros(products.shape[:2], dtype=F64, device=q.device)
    for part, size in zip(products.split(group, -1), sizes.split(group, -1), strict=True):
        own = torch.where(total == 0, -900.0, torch.frexp(total).exponent.to(F64) - 1)
        unit = power(torch.maximum(size.amax(-1), own) - bits)
        total = cut(part, unit[..., None]).sum(-1) + cut(total, unit)
        total = cut(total, power(torch.frexp(total).exponent - 24))
    return total.to(F32)


def best_model(models, logits):
    """The share of equal bits, and (group, bits) of the models that reproduce most logits."""
    shares = {which: float((modelled == logits).double().mean()) for which, modelled in models.items()}
    most = max(shares.values())
    return most, [which for which, share in shares.items() if share == most] if most else None


def attend(logits, values, scale, weights=F64):
    """Output [Q, Dv] and base-2 log-sum-exp [Q / HEADS, HEADS], in the logits' dtype."""
    scaled = logits * scale
    top = scaled.amax(-1, keepdim=True)
    p = torch.exp(scaled - top).to(weights).to(logits.dtype)
    total = p.sum(-1, keepdim=True)
    return p @ values.to(logits.dtype) / total, ((top + total.log()) / math.log(2)).reshape(-1, HEADS)


def times(actual, exact, baseline):
    """Largest RMS error of a row over the baseline's, which is at least the whole output's in proportion; and the whole's."""
    rms = lambda x: x.square().mean(-1).sqrt()  # noqa: E731
    error, lost, size = rms(actual.double() - exact), rms(baseline.double() - exact), rms(exact)
    pooled = rms(lost / size) * size
    return f"{float((error / torch.maximum(lost, pooled)).max()):5.2f} ({float(rms(error / size) / rms(lost / size)):5.2f})"


def main():
    print(f"torch {torch.__version__}, triton {triton.__version__ if triton else None}, "
          f"{torch.cuda.get_device_name() if DEVICE == 'cuda' else 'CPU'}")  # fmt: skip
    ways = {"cublas": with_cublas}
    if triton:
        ways |= {"triton, 64 rows": with_triton(64), "triton, 16 rows": with_triton(16)}
    print("error in units in the last place of float32; baselines: largest row (all rows), limits 8 (lse) and 2 (output)")
    for width, pattern in itertools.product(WIDTHS, PATTERNS):
        q, k, v, scale = draw(width, pattern)
        exact = q.double() @ k.double().T
        output, lse = attend(exact, v, scale)
        low_output, low_lse = attend(q.float() @ k.float().T, v, scale, BF16)  # on the CPU, as traceproof's baseline
        low_output = low_output.to(BF16)
        unit = power(torch.frexp(exact).exponent - 24)
        on_gpu = [x.to(DEVICE) for x in (q, k)]
        models = {which: model(*on_gpu, *which) for which in itertools.product(GROUPS, BITS)}
        for name, way in {**ways, "model (16, 25)": lambda *_, exactly=models: exactly[16, 25]}.items():
            logits = way(*on_gpu)
            share, which = best_model(models, logits)
            logits = logits.cpu().double()
            error = (logits - exact) / unit
            toward = float((error * exact.sign() < 0).double().mean())
            new_output, new_lse = attend(logits, v, scale)
            print(
                f"{width:3} {pattern:5} {name:15} mean {float(error.mean()):+6.2f} min {float(error.min()):+6.1f} max "
                f"{float(error.max()):+6.1f}, toward zero {toward:6.1%} | lse x{times(new_lse, lse, low_lse)} output "
                f"x{times(new_output, output, low_output)} | {share:6.1%} of bits by (group, bits) {which}"
            )


if __name__ == "__main__":
    main()

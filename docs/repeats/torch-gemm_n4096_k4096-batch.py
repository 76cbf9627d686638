"""functional.linear: a row's bits depend on its batch (gemm_n4096_k4096, M=16)."""

import sys

import torch
import torch.nn.functional

torch.manual_seed(0)
x1 = (0.998563 * torch.randn([16, 4096], device='cuda')).to(torch.float16)
x2 = (0.999992 * torch.randn([4096, 4096], device='cuda')).to(torch.float16)
x4 = x1[0:8].clone()
x5 = x2.clone()
x7 = x1[8:16].clone()
x8 = x2.clone()


def whole():
    r3 = torch.nn.functional.linear(x1, x2)
    return [r3]


def part_1():
    r6 = torch.nn.functional.linear(x4, x5)
    return [r6]


def part_2():
    r9 = torch.nn.functional.linear(x7, x8)
    return [r9]


def told(name, one, other):
    same = torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    apart = (one.double() - other.double()).abs().nan_to_num(float("inf")).max().item() if one.numel() else 0.0
    print(f"{name}: {'the same bits' if same else f'other bits, up to {apart:.3g} apart'}")
    return same


axes = [0]  # in which each result of the parts is joined; None: it has none
same = []
for k, (axis, one, *parts) in enumerate(zip(axes, whole(), part_1(), part_2(), strict=True)):
    if axis is not None:
        same.append(told(f"result {k}", one, torch.cat(parts, axis)))
sys.exit(not all(same))

"""BatchMLAPagedAttentionWrapper: a row's bits depend on its batch (mla_paged_decode_h16_ckv512_kpe64_ps64, batch_size=12, num_pages=37, len_indptr=13, num_kv_indices=41)."""

import sys

import flashinfer.mla
import torch

torch.manual_seed(0)
x1 = torch.zeros([134217728], dtype=torch.uint8, device='cuda')
x3 = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], dtype=torch.int32, device='cuda')
x4 = torch.tensor([0, 3, 6, 10, 14, 18, 22, 25, 29, 33, 35, 37, 41], dtype=torch.int32, device='cuda')
x5 = torch.tensor([26, 20, 6, 26, 0, 34, 26, 10, 29, 9, 26, 5, 19, 36, 26, 7, 2, 13, 26, 33, 24, 30, 26, 8, 32, 26, 21, 3, 15, 26, 28, 22, 12, 26, 23, 26, 1, 26, 14, 35, 11], dtype=torch.int32, device='cuda')
x6 = torch.tensor([145, 167, 254, 204, 226, 233, 141, 208, 224, 110, 67, 236], dtype=torch.int32, device='cuda')
x8 = (1.00961 * torch.randn([12, 16, 512], device='cuda')).to(torch.bfloat16)
x9 = (0.996614 * torch.randn([12, 16, 64], device='cuda')).to(torch.bfloat16)
x10 = (1.66337 * torch.randn([37, 64, 512], device='cuda')).to(torch.bfloat16)
x11 = (1.00053 * torch.randn([37, 64, 64], device='cuda')).to(torch.bfloat16)
x13 = torch.zeros([134217728], dtype=torch.uint8, device='cuda')
x15 = torch.tensor([0, 1, 2, 3, 4, 5, 6], dtype=torch.int32, device='cuda')
x16 = torch.tensor([0, 3, 6, 10, 14, 18, 22], dtype=torch.int32, device='cuda')
x17 = torch.tensor([26, 20, 6, 26, 0, 34, 26, 10, 29, 9, 26, 5, 19, 36, 26, 7, 2, 13, 26, 33, 24, 30], dtype=torch.int32, device='cuda')
x18 = torch.tensor([145, 167, 254, 204, 226, 233], dtype=torch.int32, device='cuda')
x20 = x8[0:6].clone()
x21 = x9[0:6].clone()
x22 = x10.clone()
x23 = x11.clone()
x25 = torch.zeros([134217728], dtype=torch.uint8, device='cuda')
x27 = torch.tensor([0, 1, 2, 3, 4, 5, 6], dtype=torch.int32, device='cuda')
x28 = torch.tensor([0, 3, 7, 11, 13, 15, 19], dtype=torch.int32, device='cuda')
x29 = torch.tensor([26, 8, 32, 26, 21, 3, 15, 26, 28, 22, 12, 26, 23, 26, 1, 26, 14, 35, 11], dtype=torch.int32, device='cuda')
x30 = torch.tensor([141, 208, 224, 110, 67, 236], dtype=torch.int32, device='cuda')
x32 = x8[6:12].clone()
x33 = x9[6:12].clone()
x34 = x10.clone()
x35 = x11.clone()


def whole():
    r2 = flashinfer.mla.BatchMLAPagedAttentionWrapper(x1, backend='fa3')
    r7 = r2.plan(x3, x4, x5, x6, 16, 512, 64, 64, False, 0.07216878235340118, torch.bfloat16, torch.bfloat16)
    r12 = r2.run(x8, x9, x10, x11, return_lse=True)
    return [r12[0], r12[1]]


def part_1():
    r14 = flashinfer.mla.BatchMLAPagedAttentionWrapper(x13, backend='fa3')
    r19 = r14.plan(x15, x16, x17, x18, 16, 512, 64, 64, False, 0.07216878235340118, torch.bfloat16, torch.bfloat16)
    r24 = r14.run(x20, x21, x22, x23, return_lse=True)
    return [r24[0], r24[1]]


def part_2():
    r26 = flashinfer.mla.BatchMLAPagedAttentionWrapper(x25, backend='fa3')
    r31 = r26.plan(x27, x28, x29, x30, 16, 512, 64, 64, False, 0.07216878235340118, torch.bfloat16, torch.bfloat16)
    r36 = r26.run(x32, x33, x34, x35, return_lse=True)
    return [r36[0], r36[1]]


def told(name, one, other):
    same = torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    apart = (one.double() - other.double()).abs().nan_to_num(float("inf")).max().item() if one.numel() else 0.0
    print(f"{name}: {'the same bits' if same else f'other bits, up to {apart:.3g} apart'}")
    return same


axes = [0, 0]  # in which each result of the parts is joined; None: it has none
same = []
for k, (axis, one, *parts) in enumerate(zip(axes, whole(), part_1(), part_2(), strict=True)):
    if axis is not None:
        same.append(told(f"result {k}", one, torch.cat(parts, axis)))
sys.exit(not all(same))

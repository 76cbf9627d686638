"""BatchMLAPagedAttentionWrapper: a row's bits depend on its batch (mla_paged_prefill_causal_h16_ckv512_kpe64_ps64, total_q=203, num_pages=35, len_indptr=13, num_kv_indices=39, batch_size=12)."""

import sys

import flashinfer.mla
import torch

torch.manual_seed(0)
x1 = torch.zeros([134217728], dtype=torch.uint8, device='cuda')
x3 = torch.tensor([0, 1, 1, 12, 17, 18, 34, 49, 64, 70, 189, 190, 203], dtype=torch.int32, device='cuda')
x4 = torch.tensor([0, 3, 6, 10, 13, 17, 20, 24, 28, 31, 33, 36, 39], dtype=torch.int32, device='cuda')
x5 = torch.tensor([34, 5, 17, 34, 20, 25, 34, 24, 29, 22, 34, 16, 9, 34, 10, 32, 19, 34, 15, 6, 34, 27, 30, 4, 34, 23, 0, 26, 34, 7, 3, 34, 8, 34, 1, 14, 34, 12, 18], dtype=torch.int32, device='cuda')
x6 = torch.tensor([154, 143, 222, 191, 211, 177, 248, 236, 157, 119, 131, 133], dtype=torch.int32, device='cuda')
x8 = (1.00703 * torch.randn([203, 16, 512], device='cuda')).to(torch.bfloat16)
x9 = (1.00867 * torch.randn([203, 16, 64], device='cuda')).to(torch.bfloat16)
x10 = (1.6703 * torch.randn([35, 64, 512], device='cuda')).to(torch.bfloat16)
x11 = (1.00179 * torch.randn([35, 64, 64], device='cuda')).to(torch.bfloat16)
x13 = torch.zeros([134217728], dtype=torch.uint8, device='cuda')
x15 = torch.tensor([0, 1, 1, 12, 17, 18, 34], dtype=torch.int32, device='cuda')
x16 = torch.tensor([0, 3, 6, 10, 13, 17, 20], dtype=torch.int32, device='cuda')
x17 = torch.tensor([34, 5, 17, 34, 20, 25, 34, 24, 29, 22, 34, 16, 9, 34, 10, 32, 19, 34, 15, 6], dtype=torch.int32, device='cuda')
x18 = torch.tensor([154, 143, 222, 191, 211, 177], dtype=torch.int32, device='cuda')
x20 = x8[0:34].clone()
x21 = x9[0:34].clone()
x22 = x10.clone()
x23 = x11.clone()
x25 = torch.zeros([134217728], dtype=torch.uint8, device='cuda')
x27 = torch.tensor([0, 15, 30, 36, 155, 156, 169], dtype=torch.int32, device='cuda')
x28 = torch.tensor([0, 4, 8, 11, 13, 16, 19], dtype=torch.int32, device='cuda')
x29 = torch.tensor([34, 27, 30, 4, 34, 23, 0, 26, 34, 7, 3, 34, 8, 34, 1, 14, 34, 12, 18], dtype=torch.int32, device='cuda')
x30 = torch.tensor([248, 236, 157, 119, 131, 133], dtype=torch.int32, device='cuda')
x32 = x8[34:203].clone()
x33 = x9[34:203].clone()
x34 = x10.clone()
x35 = x11.clone()


def whole():
    r2 = flashinfer.mla.BatchMLAPagedAttentionWrapper(x1, backend='fa3')
    r7 = r2.plan(x3, x4, x5, x6, 16, 512, 64, 64, True, 0.07216878235340118, torch.bfloat16, torch.bfloat16)
    r12 = r2.run(x8, x9, x10, x11, return_lse=True)
    return [r12[0], r12[1]]


def part_1():
    r14 = flashinfer.mla.BatchMLAPagedAttentionWrapper(x13, backend='fa3')
    r19 = r14.plan(x15, x16, x17, x18, 16, 512, 64, 64, True, 0.07216878235340118, torch.bfloat16, torch.bfloat16)
    r24 = r14.run(x20, x21, x22, x23, return_lse=True)
    return [r24[0], r24[1]]


def part_2():
    r26 = flashinfer.mla.BatchMLAPagedAttentionWrapper(x25, backend='fa3')
    r31 = r26.plan(x27, x28, x29, x30, 16, 512, 64, 64, True, 0.07216878235340118, torch.bfloat16, torch.bfloat16)
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

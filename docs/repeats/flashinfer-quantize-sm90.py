"""FlashInfer's quantisers to mxfp8 and fp4 write nothing on SM 9.0. Needs torch, FlashInfer, nvcc and such a GPU.

New memory holds one byte everywhere, and so does what they return, whatever they are given.
"""

import sys

import flashinfer
import torch

BYTE = 0x5A
rows = torch.randn(128, 4096, device="cuda").bfloat16()
scale = torch.ones(1, device="cuda")
calls = {
    "mxfp8_quantize": lambda: flashinfer.mxfp8_quantize(rows),
    "mxfp4_quantize": lambda: flashinfer.mxfp4_quantize(rows),
    "nvfp4_quantize": lambda: flashinfer.nvfp4_quantize(rows, scale),
    "fp4_quantize": lambda: flashinfer.fp4_quantize(rows, scale),
}
untouched = 0
for name, call in calls.items():
    call()  # compiled; what it leaves to the allocator is filled next
    filled = [torch.full((size,), BYTE, dtype=torch.uint8, device="cuda") for size in 4 * [1 << 14, 1 << 16, 1 << 18, 1 << 19]]
    del filled
    values = call()[0].view(torch.uint8)
    torch.cuda.synchronize()
    share = float((values == BYTE).float().mean())
    print(f"{name}: {share:.0%} of its bytes are what the memory held before")
    untouched += share > 0.9
print(f"SM {torch.cuda.get_device_capability()}: {untouched} of {len(calls)} wrote nothing")
sys.exit(untouched > 0)

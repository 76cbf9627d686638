"""FlashInfer's rmsnorm in CUDA addresses rows in 32 bits. Needs torch, FlashInfer, nvcc and 22 GiB of a GPU.

Two rows are alike, and one lies beyond 2^32 elements. What comes out must be alike too. With FLASHINFER_USE_CUDA_NORM=0
the norm in CuTe is called.
"""

import os

os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")

import torch
from flashinfer.norm import rmsnorm

ROWS, WIDTH = 1_310_788, 4096  # 5.4e9 elements: 32 bits wrap inside of the rows
torch.manual_seed(0)
x = torch.zeros(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
x[[1, ROWS - 1]] = torch.randn(1, WIDTH, device="cuda").bfloat16()
output = rmsnorm(x, torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16), out=torch.zeros_like(x))
torch.cuda.synchronize()
near, far = output[[1, ROWS - 1]].float()
off = float((far - near).norm() / near.norm())
print(f"rows alike: {torch.equal(near, far)} (off by {off:.2f} of their length)")

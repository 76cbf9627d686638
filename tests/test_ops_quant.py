"""Number formats: what they hold exactly and how they round."""

from __future__ import annotations

import op_support as ops
import torch
from planted_fp4 import requantise_fp4, to_fp4

from traceproof.ops.base import tensor
from traceproof.ops.quant import FP4_VALUES, FP8_BITS_RMS, requantise_fp8, scale_blocks, to_fp8

FP4 = ops.load("moe", "trtllm_fp4_block_scale_moe_topk4_e16_h512_i256")


def test_a_block_scale_reaches_its_block_and_no_other() -> None:
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    scaled = scale_blocks(torch.ones(4, 256), scales, height=2)
    assert torch.equal(scaled, scales.repeat_interleave(2, 0).repeat_interleave(128, 1))


def test_fp8_saturates_and_rounds_to_even() -> None:
    values = torch.tensor([1e9, -1e9, 17.0, 19.0, 0.3])
    assert to_fp8(values).tolist() == [448.0, -448.0, 16.0, 20.0, 0.3125]


def test_fp4_rounds_to_the_nearest_and_ties_to_the_even_code() -> None:
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.01, 9.0, 2.6])
    assert to_fp4(values).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -6.0, 6.0, 3.0]
    exact = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
    assert torch.equal(to_fp4(exact), exact)


def test_requantising_loses_what_the_format_loses() -> None:
    values = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    for requantise, low, high in ((requantise_fp8, 0.02, 0.03), (requantise_fp4, 0.08, 0.11)):
        loss = float((requantise(values) - values).norm() / values.norm())
        assert low < loss < high
    assert torch.equal(requantise_fp8(torch.zeros(2, 128)), torch.zeros(2, 128))
    assert torch.equal(requantise_fp4(torch.zeros(2, 128)), torch.zeros(2, 128))
    assert requantise_fp4(torch.zeros(0, 128)).shape == (0, 128)


def test_drawn_fp4_weights_are_exact_in_nvfp4_and_mxfp4() -> None:
    values = ops.inputs_of(FP4, ops.case_named(FP4, "small-0"))
    for name in ("gemm1_weights", "gemm2_weights"):
        weights = tensor(values, name)
        for block in (16, 32):
            blocks = weights.reshape(-1, block)
            scale = blocks.abs().amax(-1, keepdim=True) / 6
            assert torch.equal(to_fp4(blocks / scale) * scale, blocks)
            assert bool((torch.frexp(scale).mantissa == 0.5).all()), "a power of two"
        spread = weights.reshape(-1, 32).abs().amax(-1)
        assert float(spread.max() / spread.min()) == 4.0


def test_the_rms_of_fp8_bit_patterns_is_as_stated() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] -= 1
    values = codes.view(torch.float8_e4m3fn).to(torch.float64)
    assert abs(float(values.square().mean().sqrt()) - FP8_BITS_RMS) < 0.01

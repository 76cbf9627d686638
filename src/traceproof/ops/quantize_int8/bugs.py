"""Answers of quantize_int8."""

import torch

from traceproof.ops.common.rounding import quantising_answers
from traceproof.ops.quantize_int8.oracle import INT8_MAX

ANSWERS = quantising_answers(INT8_MAX, torch.round, torch.trunc)

"""moe: a token's chosen experts, each silu(gate) * up then down, weighed and added; routing included.

Forms are told apart by inputs and dtypes (`form.py`), routing by inputs and the reference's constants
(`routing.py`). Readings where the schema leaves room, all FlashInfer 0.6.13's:

- gemm1's rows are up first, then gate (KernelRunner.h: gatedAct = scaleC * x0 * silu(x1 * scaleGate)).
- fp8 per tensor: output1_scales_scalar multiplies up, output1_scales_gate_scalar gate, output2_scales_scalar the
  result. With top_k 1 routing is Llama 4's: sigmoid of the largest logit, multiplied onto the token before the
  first product (the kernel hands it to gemm1 and leaves it out at the end). A routing_bias is not read.
- Everywhere else the routing weight multiplies the expert's result.
- fp4 with float32 weights: the values are exactly what fp4 codes and scales stand for. Activations are what the
  schema holds; a kernel that rounds them to fp4 first loses what the comparison allows.
- topk_ids: packed (expert << 16 | bfloat16 weight) if the reference shifts right by 16; else expert indices that
  weigh 1 / top_k each, as FlashInfer's own trace template has it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.ops.base import Op, Tensors, Values
from traceproof.ops.cases import Case
from traceproof.ops.compare import Comparison, Quantised
from traceproof.ops.moe.cases import cases_of, memory_of, oracle_memory_of, stressed
from traceproof.ops.moe.experts import mixture_of, roundings, shares
from traceproof.ops.moe.form import Scaling, form_of
from traceproof.ops.moe.inputs import draw_inputs
from traceproof.ops.moe.twin import smaller_of

# Measured on the simulated kernels of tests/planted_moe.py: worst row RMS and worst slope. At the snapshot width
# (7168 x 2048) FlashInfer's fp8 block kernel, which stores gemm1's result and the activated product in fp8, loses
# 4.9 % and 0.25 %, SGLang's 2.5 % and 0.14 %; at 2048 x 512 and 2 to 16 tokens 6.3 % and 0.7 %. Per tensor 3 % and
# 0.7 %. Slopes are luck in narrow experts (256 wide, one token: up to 4 %): the oracle tells how much there is
# (`experts.roundings`), and the limit is for what goes beyond it. References in float32 lose 0.2 % and 0.05 %.
# fp4: activations in bfloat16 lose 0.5 %, in mxfp8 6 %; in nvfp4 25 %, more than is allowed here.
REQUANTISED = Quantised(
    rms=0.1,
    slope=0.01,
    reason="keeping activations in fp8 costs 3 to 9 % of a row's RMS; roundings do not tilt the slope but by luck",
)
# 16-bit intermediates lose 0.5 % of a row's RMS.
UNQUANTISED = Quantised(rms=0.02, slope=0.01, reason="16-bit intermediates cost 0.5 % of a row's RMS")
GATES: Mapping[Scaling, Quantised] = {
    Scaling.FP8_BLOCK: REQUANTISED,
    Scaling.FP8_TENSOR: REQUANTISED,
    Scaling.FP4: REQUANTISED,
    Scaling.PLAIN: UNQUANTISED,
}


class Moe(Op):
    """Mixture of experts with routing; see the module's text for the readings taken."""

    op_type = "moe"

    def check(self, definition: Definition) -> None:
        """Known: the forms of `form.Scaling` with the routing of `routing.Method`."""
        form_of(definition)

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """See `cases.cases_of`."""
        return cases_of(form_of(definition), sizes=sizes, seed=seed)

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """See `cases.stressed`."""
        return stressed(form_of(definition), seed=seed)

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """See `inputs.draw_inputs`."""
        return draw_inputs(form_of(definition), definition, case, draw)

    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """Chosen experts only, in float64, and over how many roundings of activations the slope averages."""
        form = form_of(definition)
        work = list(shares(form, inputs))
        output = mixture_of(form, inputs, work)
        return {"output": output, "output@roundings": roundings(inputs, work, output)}

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """Relative RMS error by row and slope; see GATES for the limits and why."""
        return {"output": GATES[form_of(definition).scaling]}

    def memory(self, definition: Definition, case: Case) -> int:
        """See `cases.memory_of`."""
        return memory_of(form_of(definition), case)

    def oracle_memory(self, definition: Definition, case: Case) -> int:
        """It widens a few slices of weights at a time, a reference all of them."""
        return oracle_memory_of(form_of(definition), case)

    def smaller(self, definition: Definition, fixed: Collection[str]) -> Mapping[str, int]:
        """See `twin.smaller_of`."""
        return smaller_of(form_of(definition), definition, fixed)


OP = Moe()

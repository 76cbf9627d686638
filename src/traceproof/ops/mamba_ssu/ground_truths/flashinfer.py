"""FlashInfer's selective state update."""

from traceproof.ops.adapter import SM80, Adapter, Definition, Module, dim
from traceproof.ops.common.ground_truths.flashinfer import dtype_name
from traceproof.ops.mamba_ssu.ground_truths import UPDATE
from traceproof.ops.mamba_ssu.ground_truths.common import update


def _modules(definition: Definition, capability: tuple[int, int]) -> tuple[Module, ...]:
    """One token per row, no scaled states or stochastic rounding; the last two dtypes are its defaults."""
    kinds = [dtype_name(definition, name) for name in ("state", "x", "dt", "A", "state_batch_indices")]
    sizes = (dim(definition, "state", 2), dim(definition, "state", 3))
    generator = {9: "gen_mamba_sm90", 10: "gen_mamba_sm100"}.get(capability[0], "gen_mamba")
    return (Module(generator, (*kinds, None, *sizes, 1, "torch.int32", "torch.int64", 0)),)


def _accepts(definition: Definition) -> bool:
    """The kernels are written for these widths only."""
    return dim(definition, "state", 2) in {64, 128} and dim(definition, "state", 3) in {64, 128, 256}


ADAPTERS = (
    Adapter(
        "mamba.selective_state_update", UPDATE, update, ("mamba",), accepts=_accepts, modules=_modules, sm=SM80
    ),
)

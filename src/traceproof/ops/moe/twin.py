"""The axes of a smaller mixture of experts that routes and multiplies as the whole one does."""

from collections.abc import Collection, Iterable, Mapping

from traceproof.dataset.definition import Definition
from traceproof.ops.common.quant import BLOCK
from traceproof.ops.moe.form import TENSOR_SCALES, Form

HIDDEN, INTERMEDIATE = 512, 256  # several blocks each, and not the same number of them
LEAST = 8  # experts
CANDIDATES = 2  # for each expert that a token goes to, so that there is a choice

Places = tuple[tuple[str, int], ...]  # inputs with the dimension that an axis stands in
ALONG_HIDDEN: Places = (("hidden_states", 1), ("gemm1_weights", 2), ("gemm2_weights", 1))
HIDDEN_BLOCKS: Places = (("hidden_states_scale", 0), ("gemm1_weights_scale", 2), ("gemm2_weights_scale", 1))
# By how many of an expert's intermediate columns one element of the axis counts, times two.
ALONG_INTERMEDIATE: Mapping[Places, int] = {
    (("gemm2_weights", 2),): 2,
    (("gemm1_weights", 1),): 1,
    (("gemm2_weights_scale", 2),): 2 * BLOCK,
    (("gemm1_weights_scale", 1),): BLOCK,
}
EXPERTS: Places = (("routing_logits", 1), ("routing_bias", 0))
LOCAL: Places = tuple(
    (name, 0)
    for name in ("gemm1_weights", "gemm2_weights", "gemm1_weights_scale", "gemm2_weights_scale", *TENSOR_SCALES)
)


def smaller_of(form: Form, definition: Definition, fixed: Collection[str]) -> dict[str, int]:
    """Sizes of the axes that may shrink: matrices to a few blocks, experts to few per group.

    Groups, experts per token and the share of the experts that is local stay. What one size decides (blocks along
    it, twice the intermediate size) shrinks with it or, where one of these axes is fixed, not at all.
    """
    hidden = _axes(definition, ALONG_HIDDEN, HIDDEN) | _axes(definition, HIDDEN_BLOCKS, HIDDEN // BLOCK)
    intermediate = {
        axis: size
        for places, columns in ALONG_INTERMEDIATE.items()
        for axis, size in _axes(definition, places, 2 * INTERMEDIATE // columns).items()
    }
    experts = _experts(form)
    mixture = _axes(definition, LOCAL, form.local * experts // form.experts) | _axes(definition, EXPERTS, experts)
    if (
        definition.const_axes.get("num_experts") == form.experts
    ):  # where tokens come with their experts, no shape has it
        mixture["num_experts"] = experts
    groups = (
        hidden if form.hidden > HIDDEN else {},
        intermediate if form.intermediate > INTERMEDIATE else {},
        mixture,
    )
    return {axis: size for group in groups if group.keys().isdisjoint(fixed) for axis, size in group.items()}


def _axes(definition: Definition, places: Iterable[tuple[str, int]], size: int) -> dict[str, int]:
    """The axes in some places of those inputs that there are, each with that size."""
    shapes = {name: spec.shape or () for name, spec in definition.inputs.items()}
    return {shapes[name][place]: size for name, place in places if name in shapes}


def _experts(form: Form) -> int:
    """The smallest number of experts that groups, the choice in them and the local share allow."""
    routing = form.routing
    group = form.experts // routing.groups
    enough = min(CANDIDATES * routing.top_k, group * routing.top_groups)
    for per_group in range(2, group):
        experts = per_group * routing.groups
        share = experts * form.local
        whole = (
            group % per_group == 0 and share % form.experts == 0 and share // form.experts >= min(2, form.local)
        )
        if whole and experts >= LEAST and per_group * routing.top_groups >= enough:
            return experts
    return form.experts

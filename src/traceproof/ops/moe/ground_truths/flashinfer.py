"""FlashInfer's TensorRT-LLM mixtures of experts: kernels of SM 10.x, fetched as binaries."""

from functools import partial

from traceproof.ops.adapter import Adapter, Api, Definition, Outputs, Values, scalar, signature, tensor
from traceproof.ops.moe.form import Scaling, form_of
from traceproof.ops.moe.routing import Method

BLACKWELL = ((10, 0), (10, 9))
# FlashInfer's RoutingMethodType.
METHODS = {Method.DEEPSEEK: 2, Method.RENORMALISE: 1, Method.LLAMA4: 3}


def _fp8_block(api: Api, definition: Definition, inputs: Values) -> Outputs:
    form = form_of(definition)
    grouped = form.routing.method is Method.DEEPSEEK
    output = api["moe_fp8_block"](
        tensor(inputs, "routing_logits"),
        tensor(inputs, "routing_bias") if form.has_bias else None,
        tensor(inputs, "hidden_states"),
        tensor(inputs, "hidden_states_scale"),
        tensor(inputs, "gemm1_weights"),
        tensor(inputs, "gemm1_weights_scale"),
        tensor(inputs, "gemm2_weights"),
        tensor(inputs, "gemm2_weights_scale"),
        num_experts=form.experts,
        top_k=form.routing.top_k,
        n_group=form.routing.groups if grouped else None,
        topk_group=form.routing.top_groups if grouped else None,
        intermediate_size=form.intermediate,
        local_expert_offset=int(scalar(inputs, "local_expert_offset")) if form.has_offset else 0,
        local_num_experts=form.local,
        routed_scaling_factor=scalar(inputs, "routed_scaling_factor") if grouped else None,
        routing_method_type=METHODS[form.routing.method],
        use_shuffled_weight=False,
    )
    return {"output": output}


def _fp8_tensor(api: Api, definition: Definition, inputs: Values) -> Outputs:
    form = form_of(definition)
    llama = form.routing.method is Method.LLAMA4
    output = api["moe_fp8_tensor"](
        tensor(inputs, "routing_logits"),
        tensor(inputs, "routing_bias") if form.has_bias and not llama else None,
        tensor(inputs, "hidden_states"),
        tensor(inputs, "gemm1_weights"),
        tensor(inputs, "output1_scales_scalar"),
        tensor(inputs, "output1_scales_gate_scalar"),
        tensor(inputs, "gemm2_weights"),
        tensor(inputs, "output2_scales_scalar"),
        num_experts=form.experts,
        top_k=form.routing.top_k,
        n_group=None,
        topk_group=None,
        intermediate_size=form.intermediate,
        local_expert_offset=0,
        local_num_experts=form.local,
        routed_scaling_factor=None,
        use_routing_scales_on_input=llama,
        routing_method_type=METHODS[form.routing.method],
    )
    return {"output": output}


def _scaled(scaling: Scaling, definition: Definition) -> bool:
    form = form_of(definition)
    return form.scaling is scaling and not form.routing.given


COMMON = "routing_logits hidden_states gemm1_weights gemm2_weights [routing_bias]"
BLOCK = "hidden_states_scale gemm1_weights_scale gemm2_weights_scale [local_expert_offset] [routed_scaling_factor]"
PER_TENSOR = "output1_scales_scalar output1_scales_gate_scalar output2_scales_scalar"

ADAPTERS = tuple(
    Adapter(
        name,
        signature(f"{COMMON} {own} -> output", rows="hidden_states"),
        call,
        (api,),
        accepts=partial(_scaled, scaling),
        sm=BLACKWELL,
    )
    for name, own, call, api, scaling in (
        ("trtllm_fp8_block_scale_moe", BLOCK, _fp8_block, "moe_fp8_block", Scaling.FP8_BLOCK),
        ("trtllm_fp8_per_tensor_scale_moe", PER_TENSOR, _fp8_tensor, "moe_fp8_tensor", Scaling.FP8_TENSOR),
    )
)

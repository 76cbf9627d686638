"""SGLang on the CPU, to read models with; built only where models are extracted."""

from traceproof.stacks import Stack

STACK = Stack(name="extract", package="sglang", distribution="sglang", reads_models=True, gb={"extract": 2.1})

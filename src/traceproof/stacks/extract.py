"""SGLang on the CPU, for reading models; built only where models are extracted."""

from traceproof.stacks import Stack

STACK = Stack(name="extract", package="sglang", distribution="sglang", reads_models=True, gb={"extract": 2.1})

"""Which modules hold a stack's adapters: found by their files, nothing is imported, and torch may be absent."""

from traceproof import codedigest
from traceproof.ops.registry import ground_truth, known
from traceproof.stacks import truths_of


def op_types(stack: str) -> list[str]:
    """The op_types that a ground truth of a stack has adapters for."""
    return [op_type for op_type in known() if adapter_modules(stack, op_type)]


def adapter_modules(stack: str, op_type: str) -> list[str]:
    """The modules that hold a stack's adapters for an op_type, one per ground truth."""
    found = (ground_truth(op_type, truth) for truth in truths_of(stack))
    return [module for module in found if module is not None]


def compiles(truth: str, op_type: str) -> bool:
    """Whether a ground truth's adapters for an op_type name kernel modules to compile ahead."""
    own = ground_truth(op_type, truth)
    reached = codedigest.closure(*([own] if own else []))
    used = (name for name in reached if name.endswith(f".{truth}") and not name.startswith("traceproof.stacks."))
    return any(b"modules=" in codedigest.file_of(module).read_bytes() for module in used)

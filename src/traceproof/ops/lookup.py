"""Find the call of a ground truth for a definition: a hand-written adapter, else the function that it names.

A tag `fi_api:` says which function a definition was dumped from, and the package's own template which parameter
takes which input; where it has no template, names are compared.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.adapter import TORCH_DTYPES, Adapter, Outputs, Signature, sizes
from traceproof.ops.base import Value, Values
from traceproof.reasons import Skip, Unavailable, UnavailableError
from traceproof.stacks import STACK_OF, STACKS, Stack

ANY_GPU = ((0, 0), (99, 9))  # the function itself refuses GPUs that it does not run on
RUNS_ON = "is_compute_capability_supported"  # attribute of a function: whether it runs on a compute capability
WORKSPACE = "workspace"  # word of a parameter that takes memory to work in
WORKED_IN = {WORKSPACE, "semaphores"}  # words of such inputs, whose sizes definitions leave open
WORKSPACE_BYTES = 128 << 20
# Errors of a function that refuses a GPU: "requires SM100 or SM103, got SM90", "requires compute capability 10.0".
NEEDS = re.compile(r"require|support|need|only", re.IGNORECASE)
GOT = re.compile(r"\b(?:got|has|have|but|found|current|device cuda)\b", re.IGNORECASE)
OR_NEWER = re.compile(r"\+|newer|later|higher|above|at least|>=", re.IGNORECASE)
SM = re.compile(r"\bSM[ _-]?(\d{2,3})", re.IGNORECASE)
CAPABILITY = re.compile(r"\b(\d{1,2})\.(\d)\b")
REFUSED = re.compile(r"(?:does not support .* with capability |not supported on\s+\.target 'sm_)(\d+)")
MAJORS = re.compile(r"No supported CUDA architectures found for major versions \[([\d, ]+)\]")
# Errors of a function whose dependencies are not installed.
ABSENT = re.compile(
    r"not found locally|(?:requires|not found).*\bpip install|Failed to load cubin|require\b.*\bpython package\)",
    re.DOTALL,
)
OF_XQA = re.compile(r"XQA MLA does not support|only supported by the trtllm-gen backend")  # below SM 10.0
# Errors by which a function refuses a call, whatever the GPU.
REFUSALS: Mapping[Skip, re.Pattern[str]] = {
    Skip.PACKAGE_ABSENT: ABSENT,
    Skip.DTYPE_UNSUPPORTED: re.compile(
        r"^Invalid dtype\b.*\bsupported|\bsupports FP16->FP16\b.*\bgot\b", re.DOTALL
    ),
    # sizes beyond a kernel's own limits, which the definition does not state
    Skip.UNSUPPORTED: re.compile(
        r"must be one of \([\d, ]+\) for the \w+ profile|this kernel caps \w+ at \d+; got"
    ),
}
MAY_BE_NONE = re.compile(r"\bOptional\[|\| None\b|\bNone \|")  # in a parameter's annotation
Parameters = Mapping[str, tuple[str, int | None]]  # by input: the function's parameter, the element of its tuple
NAMED = (
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
    inspect.Parameter.POSITIONAL_ONLY,
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an input or output goes: a parameter, or an element of the tuple that it takes."""

    parameter: str
    element: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """How a function is called for a definition."""

    inputs: Mapping[str, Place]  # place of each input
    written: Mapping[str, Place]  # place of each output that the function writes to an argument
    returned: tuple[str, ...]  # the other outputs, in the order in which it returns them
    flags: tuple[str, ...]  # parameters return_<output>, which must be true
    axes: Mapping[str, str]  # axis of each parameter that takes its size
    workspaces: tuple[str, ...]  # parameters that take memory to work in
    nullable: tuple[str, ...]  # parameters without a default that are None where no input is given for them


def adapter(name: str, definition: Definition) -> Adapter | None:
    """The first adapter of a ground truth that has the definition's form."""
    adapters = registry.get(definition.op_type).truths.get(name, ())
    return next((item for item in adapters if item.matches(definition)), None)


def serving(name: str, definition: Definition) -> Adapter | None:
    """The hand-written adapter, else the call that the definition itself names; None: there is neither."""
    stack = STACKS[STACK_OF[name]]
    first = stack.truths[0].name == name
    return adapter(name, definition) or (api_adapter(stack, definition) if first else None)


# The function that a definition names.


def api_adapter(stack: Stack, definition: Definition) -> Adapter | None:
    """The adapter of a definition dumped from a function of a stack's package; None: it names none.

    A method is none: its object has to be made and planned first, which only a hand-written adapter knows.
    """
    dotted_name = definition.dumped_from
    module, _, name = dotted_name.rpartition(".")
    is_method = module.rpartition(".")[2][:1].isupper()
    if not stack.tagged or is_method or not dotted_name.startswith(f"{stack.package}."):
        return None
    key = f"{module}:{name}"

    @cache
    def bound(function: Callable[..., Any]) -> Binding | str:
        parameters: Parameters = {}
        if stack.parameters:  # the function that reads the package's templates
            reader_module, _, reader = stack.parameters.partition(":")
            read_parameters = getattr(importlib.import_module(reader_module), reader)
            parameters = read_parameters(dotted_name, tuple(definition.inputs))
        return binding(function, definition, parameters)

    return Adapter(
        dotted_name.removeprefix(f"{stack.package}."),
        Signature(frozenset(definition.inputs), frozenset(), frozenset(definition.outputs), None),
        lambda api, dumped, inputs: call(api[key], bound(api[key]), dumped, inputs),
        (key,),
        refuses=lambda api, _: refused(api[key], bound(api[key])),
        sm=ANY_GPU,
    )


def refused(function: Callable[..., Any], bound: Binding | str) -> Unavailable | None:
    """Why a function can not be called for a definition on this GPU; None: it can."""
    runs_on = getattr(function, RUNS_ON, None)
    if runs_on is not None and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if not runs_on(major * 10 + minor):
            return Unavailable(Skip.NEEDS_SM, f"the function says that it does not run on SM {major}.{minor}")
    return Unavailable(Skip.NO_ADAPTER, bound) if isinstance(bound, str) else None


def binding(function: Callable[..., Any], definition: Definition, parameters: Parameters) -> Binding | str:
    """How to call a function for a definition, or why that is not known.

    An input's parameter is the template's, the one of its name, or that in lower case.
    """
    known = inspect.signature(function).parameters
    in_lower_case = {name.lower(): name for name in known}
    inputs: dict[str, Place] = {}
    for name in definition.inputs:
        parameter, element = parameters.get(name, (in_lower_case.get(name.lower(), name), None))
        if parameter in known:
            inputs[name] = Place(parameter, element)
    lost = [name for name, spec in definition.inputs.items() if name not in inputs and not spec.optional]
    if lost:
        return f"no parameter of {getattr(function, '__name__', 'it')} takes {', '.join(lost)}"
    handles = [name for name, spec in definition.inputs.items() if spec.shape is None and _is_workspace(name)]
    if handles:
        return f"its {handles[0]} is an object that the definition has as a number"

    written = _written(function, definition, inputs)
    of_inputs = {place.parameter for place in inputs.values()}
    filled = of_inputs | {place.parameter for place in written.values()}
    required = [name for name, one in known.items() if one.default is one.empty and one.kind in NAMED]
    workspaces = [name for name in required if name not in filled and _is_workspace(name)]
    rest = [name for name in required if name not in {*filled, *workspaces}]
    # by words in any order: `local_num_experts` is the axis `num_local_experts`
    by_words = {_words(axis): axis for axis in _sized(definition)}
    axes = {name: by_words[_words(name)] for name in rest if _words(name) in by_words}
    nullable = [name for name in rest if name not in axes]
    unknown = [name for name in nullable if not MAY_BE_NONE.search(str(known[name].annotation))]
    if unknown:
        return f"its parameter {unknown[0]} is no input of the definition"
    optional = {place.parameter for name, place in inputs.items() if definition.inputs[name].optional}
    return Binding(
        inputs=inputs,
        written=written,
        returned=tuple(name for name in definition.outputs if name not in written),
        flags=tuple(flag for name in definition.outputs if (flag := f"return_{name}") in {*known} - of_inputs),
        axes=axes,
        workspaces=tuple(workspaces),
        nullable=(*nullable, *(name for name in required if name in optional)),
    )


def _written(
    function: Callable[..., Any], definition: Definition, inputs: Mapping[str, Place]
) -> dict[str, Place]:
    """Place of each output that a function writes to an argument, which may be an input's.

    An argument that the function may make itself is left to it where its dtype or its shape is not known.
    """
    signature = inspect.signature(function)
    known = signature.parameters
    returns_all = str(signature.return_annotation).count("Tensor") == len(definition.outputs)
    of_inputs = {place.parameter for place in inputs.values()}
    places: dict[str, Place] = {}
    for name, spec in definition.outputs.items():
        stem = "" if returns_all else name.removesuffix("_out")  # `query_out` may be the argument `query`
        parameter = next((one for one in (spec.param or name, name, stem) if one in known), None)
        if parameter is None:
            if spec.param is not None and spec.param in inputs:
                places[name] = inputs[spec.param]
            continue
        required = known[parameter].default is inspect.Parameter.empty
        sized = _sized(definition).issuperset(spec.shape or ())
        described = spec.param == parameter and spec.dtype in TORCH_DTYPES and sized
        if parameter in of_inputs or required or described:
            places[name] = Place(parameter)
    return places


def _words(name: str) -> tuple[str, ...]:
    """The words of a name, sorted."""
    return tuple(sorted(name.split("_")))


def _sized(definition: Definition) -> set[str]:
    """Axes whose size inputs or the definition tell."""
    return {axis for spec in definition.inputs.values() for axis in spec.shape or ()} | {*definition.const_axes}


def _is_workspace(name: str) -> bool:
    """Whether a parameter of that name takes memory to work in, or an object that holds it."""
    return WORKSPACE in name.split("_")


def call(function: Callable[..., Any], bound: Binding | str, definition: Definition, inputs: Values) -> Outputs:
    """Call a function on copies of the inputs; returns the outputs that it returned, or wrote to its arguments.

    Raises:
        TypeError: it takes or returns something else than the definition says.
        UnavailableError: it says that it needs another GPU, or the definition does not say what it writes to.
    """
    if isinstance(bound, str):
        raise TypeError(bound)
    arguments = _arguments(bound, definition, inputs)
    try:
        returned = function(**arguments)
    except Exception as error:  # compilers raise exceptions of many classes
        refusal = _refusal(str(error))
        if refusal is None:
            raise
        raise UnavailableError(refusal) from error
    outputs = {
        name: arguments[place.parameter] if place.element is None else arguments[place.parameter][place.element]
        for name, place in bound.written.items()
        if place.parameter in arguments
    }
    values = list(returned) if isinstance(returned, tuple | list) else [returned]
    values = [value for value in values if isinstance(value, torch.Tensor)]
    if len(values) < len(bound.returned):
        raise TypeError(f"it returned {len(values)} tensors for the outputs {list(bound.returned)}")
    return outputs | dict(zip(bound.returned, values, strict=False))


def _refusal(message: str) -> Unavailable | None:
    """The skip that an exception's text means; None: it is an error."""
    for reason, pattern in REFUSALS.items():
        if pattern.search(message):
            return Unavailable(reason, message)
    if torch.cuda.is_available() and asks_for_another(message, torch.cuda.get_device_capability()):
        return Unavailable(Skip.NEEDS_SM, message)
    return None


def _arguments(bound: Binding, definition: Definition, inputs: Values) -> dict[str, Any]:
    """Keyword arguments of a call: copies of the inputs, sizes, and memory for what it writes.

    Raises UnavailableError: the definition does not say an output argument's dtype or size.
    """
    size_of = sizes(definition, inputs)
    device = next((value.device for value in inputs.values() if isinstance(value, torch.Tensor)), None)
    arguments: dict[str, Any] = dict.fromkeys(bound.flags, True) | dict.fromkeys(bound.nullable)
    arguments |= {name: size_of[axis] for name, axis in bound.axes.items()}
    for name in bound.workspaces:  # cleared, as FlashInfer's examples have it
        arguments[name] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    tuples: dict[str, dict[int, Any]] = {}  # parameter -> index -> element
    for name, place in bound.inputs.items():
        value = _copied(name, inputs[name])
        if value is None:
            continue
        if place.element is None:
            arguments[place.parameter] = value
        else:
            tuples.setdefault(place.parameter, {})[place.element] = value
    arguments |= {name: tuple(parts[index] for index in sorted(parts)) for name, parts in tuples.items()}
    of_inputs = {place.parameter for place in bound.inputs.values()}
    for name, place in bound.written.items():
        spec = definition.outputs[name]
        if place.parameter in arguments or (spec.optional and place.parameter in of_inputs):  # it is an input too
            continue
        dtype = TORCH_DTYPES.get(spec.dtype)
        if dtype is None or any(axis not in size_of for axis in spec.shape or ()):
            said = f"an output argument of dtype {spec.dtype} and shape {spec.shape} can not be made"
            raise UnavailableError(Unavailable(Skip.NO_ADAPTER, said))
        shape = definition.shape_of(spec, size_of) or ()
        arguments[place.parameter] = torch.empty(shape, dtype=dtype, device=device)
    return arguments


def _copied(name: str, value: Value) -> Value:
    """A copy of an input; of memory to work in a large zeroed one, since kernels write beyond a small one."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 1 and WORKED_IN & {*name.split("_")}:
        return value.new_zeros(WORKSPACE_BYTES // value.element_size())
    return value.clone()


def lacking(error: UnavailableError | RuntimeError) -> Unavailable:
    """Why an error makes a call, hand-written too, unavailable: a package is absent. Else raises the error."""
    if isinstance(error, UnavailableError):
        return error.unavailable
    if ABSENT.search(str(error)) is None:
        raise error
    return Unavailable(Skip.PACKAGE_ABSENT, str(error))


def asks_for_another(message: str, here: tuple[int, int]) -> bool:
    """Whether an error's text says that a function needs a GPU of another compute capability than `here`."""
    if OF_XQA.search(message):
        return here < (10, 0)
    number = here[0] * 10 + here[1]
    majors = MAJORS.search(message)
    if majors is not None and here[0] not in map(int, majors[1].split(",")):
        return True
    if number in map(int, REFUSED.findall(message)):
        return True
    needs = GOT.split(message, maxsplit=1)[0]  # without what it says of this GPU
    named = {int(sm) for sm in SM.findall(needs)}
    if "capabilit" in needs:
        named |= {int(major) * 10 + int(minor) for major, minor in CAPABILITY.findall(needs)}
    if not named or not NEEDS.search(needs):
        return False
    return number < min(named) if OR_NEWER.search(needs) else number not in named

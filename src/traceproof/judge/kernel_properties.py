"""Properties of kernels that are measured in addition to correct answers. Imports the standard library alone."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Property:
    """A property of a kernel: what circumstance is changed, and whether a solution must bear it."""

    question: str  # the circumstance, for people
    demanded: bool  # whether a solution without it is refused, unless config.yaml says otherwise
    # whether a wrong answer or a failed call counts even where the property is only reported
    must_run: bool = True


PROPERTIES: Mapping[str, Property] = {
    "determinism": Property("the same call again in the same process", demanded=False),
    "process": Property("the same call in a new process, with nothing before it", demanded=True),
    "order": Property("the same call after calls in other sizes", demanded=True),
    "memory": Property("other values in memory that nobody has written", demanded=True),
    "surroundings": Property("other values around the inputs, as reads out of bounds see them", demanded=True),
    "bounds": Property("inputs and new memory between pages that nothing may touch", demanded=True),
    "addresses": Property("inputs at other addresses of the same alignment", demanded=True),
    "contents": Property(
        "other inputs in the memory of the last ones, with the same sums and ends", demanded=True
    ),
    "threads": Property("two threads of the host in place of one", demanded=False),
    "alignment": Property(
        "inputs that begin one element after a multiple of 64 bytes", demanded=False, must_run=False
    ),
    "strides": Property(
        "inputs whose rows do not lie side by side, of which no definition speaks", demanded=False, must_run=False
    ),
    "batch": Property("parts of a batch alone, and beside others", demanded=False),
    "empty": Property("calls with nothing to compute, of a batch without rows", demanded=False, must_run=False),
    "errors": Property(
        "another dtype, an axis one short, lengths and places that can not be: it raises, or is right",
        demanded=False,
        must_run=False,
    ),
    "stream": Property("on another CUDA stream, which still writes the inputs", demanded=True),
    "load": Property("many times beside other work that fills the GPU, and on a part of it", demanded=False),
    "graph": Property("captured as a CUDA graph and replayed on other contents", demanded=False, must_run=False),
}
DEMANDED = tuple(name for name, measured in PROPERTIES.items() if measured.demanded)

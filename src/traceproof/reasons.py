"""Verdicts and the reason codes that go with them."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """The result of one comparison."""

    PASS = "pass"  # noqa: S105 - a verdict, not a password
    FAIL = "fail"
    ERROR = "error"
    SKIP = "skip"


WORST_FIRST = (Verdict.ERROR, Verdict.FAIL, Verdict.PASS, Verdict.SKIP)


class Grade(StrEnum):
    """How strong the proof is that a passing reference is right, strongest first."""

    PROVED = "proved"  # an independent oracle and a ground truth
    CHECKED = "checked"  # an independent oracle alone
    AGREED = "agreed"  # no oracle: the reference's float64 shadow and a ground truth
    CONSISTENT = "consistent"  # the shadow alone; or an oracle whose constants the reference alone states
    # an independent oracle, for the same reference with smaller const axes: nothing was judged in full size
    SCALED_DOWN = "scaled_down"


class Skip(StrEnum):
    """Why something was not run or not compared; other reasons are errors."""

    NO_CUDA = "no_cuda"
    NEEDS_SM = "needs_sm"
    PACKAGE_ABSENT = "package_absent"
    API_ABSENT = "api_absent"
    NO_ADAPTER = "no_adapter"
    DOES_NOT_FIT = "does_not_fit"
    BLOB_MISSING = "blob_missing"
    NO_ORACLE = "no_oracle"
    UNJUDGED = "unjudged"  # a declared output that was not compared
    NO_REFERENCE = "no_reference"
    NO_INPUTS = "no_inputs"
    DTYPE_UNSUPPORTED = "dtype_unsupported"
    UNSUPPORTED = "unsupported"  # the implementation says that it does not support this layout, size or option


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A skip with its reason: why an implementation can not run a definition here."""

    reason: Skip
    message: str


class UnavailableError(Exception):
    """A skip that only a call could discover."""

    def __init__(self, unavailable: Unavailable) -> None:
        super().__init__(unavailable.message)
        self.unavailable = unavailable


class Failure(StrEnum):
    """Why a comparison failed."""

    PRESENCE = "presence"
    SHAPE = "shape"
    DTYPE = "dtype"
    NAN = "nan"
    INFINITY = "infinity"
    NUMERICS = "numerics"
    DETERMINISM = "determinism"
    MUTATION = "mutated_input"
    ALIAS = "aliased_output"
    SUBCLASS = "tensor_subclass"
    CACHED = "cached_answer"
    OVERRUN = "out_of_bounds"
    LATE = "late_output"
    CONSTANTS = "constants_disagree"  # the definition's sources state different values of a constant


class Error(StrEnum):
    """Why there is nothing to compare."""

    DEFINITION = "bad_definition"
    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    CRASH = "crash"
    OUTPUT = "output_flood"
    PROCESSES = "too_many_processes"
    REFUSED = "refused"
    ISOLATION = "weak_isolation"
    INPUTS_DIFFER = "inputs_differ"
    ORACLE = "oracle"

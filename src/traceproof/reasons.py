"""Verdicts and the reason codes that go with them."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What came of one comparison."""

    PASS = "pass"  # noqa: S105 - a verdict, not a password
    FAIL = "fail"
    ERROR = "error"
    SKIP = "skip"


class Grade(StrEnum):
    """How strong the proof is that a passing reference is right; the first is the strongest."""

    PROVED = "proved"  # an independent oracle and a ground truth
    CHECKED = "checked"  # an independent oracle alone
    AGREED = "agreed"  # no oracle: the reference's float64 shadow and a ground truth
    CONSISTENT = "consistent"  # the shadow alone; or an oracle whose constants the reference alone states
    # an independent oracle, of the same reference with smaller const axes: nothing in full size
    SCALED_DOWN = "scaled_down"


class Skip(StrEnum):
    """Why something was not run or not compared. Anything else is an error."""

    NO_CUDA = "no_cuda"
    NEEDS_SM = "needs_sm"
    PACKAGE_ABSENT = "package_absent"
    API_ABSENT = "api_absent"
    NO_ADAPTER = "no_adapter"
    DOES_NOT_FIT = "does_not_fit"
    BLOB_MISSING = "blob_missing"
    NO_ORACLE = "no_oracle"
    UNJUDGED = "unjudged"  # an output that the definition declares and nobody compared
    NO_REFERENCE = "no_reference"
    NO_INPUTS = "no_inputs"
    DTYPE_UNSUPPORTED = "dtype_unsupported"
    UNSUPPORTED = "unsupported"  # of this layout, size or option an implementation says that it does not take it


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A typed skip: why an implementation can not run a definition here."""

    reason: Skip
    message: str


class UnavailableError(Exception):
    """A typed skip that only a call could find out."""

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
    CONSTANTS = "constants_disagree"  # of the definition: what states a constant of it says different values


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

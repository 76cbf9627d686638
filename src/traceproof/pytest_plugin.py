"""A pytest plugin: a test with the mark runs once per case of an op or definition, in the fixture `case`.

    @pytest.mark.traceproof("rmsnorm", hidden_size=4096)
    def test_my_norm(case):
        case.check(my_norm)

With `isolated=True` it runs once: `case.check("kernel.py::norm")`, or a function at a file's top level, is judged
in all cases, also hidden ones, in separate processes, like `traceproof judge`.

Nothing is imported unless a test has the mark.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from traceproof.api import DrawnCase, IsolatedCases

MARK = "traceproof"


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    what = "run once per case of an op or definition; the arguments are those of traceproof.cases, and isolated"
    config.addinivalue_line("markers", f"{MARK}(of, **options): {what}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise a marked test with its cases, in the order of its marks."""
    marks = list(metafunc.definition.iter_markers(MARK))
    if not marks or "case" not in metafunc.fixturenames:
        own = [mark for mark in metafunc.definition.own_markers if mark.name == MARK]
        if own:  # a class's mark is for those of its tests that take a case
            what = f"{metafunc.definition.nodeid}, @pytest.mark.{MARK}: it takes no `case`, and judges nothing"
            raise pytest.fail.Exception(what, pytrace=False)
        return
    from traceproof.api import IsolatedCases, cases
    from traceproof.errors import TraceproofError

    parameters: list[DrawnCase | IsolatedCases] = []
    try:
        for mark in reversed(marks):
            options = dict(mark.kwargs)
            if options.pop("isolated", False):
                parameters.append(IsolatedCases(*mark.args, options=options))  # type: ignore[misc]
            else:
                parameters += cases(*mark.args, unavailable=True, **options)
        ids = [f"{case.definition.name}-{case.id}" for case in parameters]
    except (TraceproofError, TypeError) as error:  # a wrong argument of the mark
        what = f"{metafunc.definition.nodeid}, @pytest.mark.{MARK}: {error}"
        raise pytest.fail.Exception(what, pytrace=False) from None
    metafunc.parametrize("case", parameters, ids=ids, indirect=True)


@pytest.fixture
def case(request: pytest.FixtureRequest) -> "DrawnCase | IsolatedCases":
    """One case: `inputs`, `expected`, and `check(function)` or `check(outputs)`, which fails with a report.

    A case that can not be judged here is skipped; the skip begins with its reason, as in `traceproof.reasons`.
    """
    parameter: DrawnCase | IsolatedCases | None = getattr(request, "param", None)
    if parameter is None:
        raise pytest.UsageError(f"{request.node.nodeid} has no @pytest.mark.{MARK}(...), which gives it cases")
    why = parameter.unavailable
    if why is not None:
        pytest.skip(f"{why.reason}: {why.message}")
    # a copy, whose tensors are freed after the test
    return replace(parameter, repeat=f"pytest '{request.node.nodeid}'")

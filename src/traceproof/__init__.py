"""traceproof: proves LLM kernels and their references right, against independent float64 oracles.

`check` judges a function, `assert_right` outputs that somebody else computed; `cases` gives adversarial inputs and
what is expected of them; `judge_file` runs a file isolated; `verify` judges a definition's own reference;
`definition` says what is judged. Nothing is imported before one of them is used: PyTorch takes seconds.
"""

__version__ = "0.1.0"
__all__ = ["Report", "TraceproofError", "assert_right", "cases", "check", "definition", "judge_file", "verify"]
TYPE_CHECKING = False  # type checkers know the name; the module `typing` takes milliseconds

if TYPE_CHECKING:
    from traceproof.api import Report, assert_right, cases, check, definition, judge_file, verify
    from traceproof.errors import TraceproofError
else:

    def __getattr__(name: str) -> object:
        """Import what is public when it is first asked for."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        module = import_module("traceproof.errors" if name == "TraceproofError" else "traceproof.api")
        globals().update({one: getattr(module, one) for one in __all__ if hasattr(module, one)})
        return globals()[name]

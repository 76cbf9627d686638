"""traceproof: proves LLM kernels and their references right, against independent float64 oracles.

`check` judges a function, `assert_right` outputs computed elsewhere; `cases` yields adversarial inputs with
expected values; `judge_file` judges a file, isolated; `verify` judges a definition's own reference; `definition`
makes or reads a definition. They are imported when first used, since PyTorch takes seconds.
"""

__version__ = "0.1.0"
__all__ = ["Report", "TraceproofError", "assert_right", "cases", "check", "definition", "judge_file", "verify"]
TYPE_CHECKING = False  # as in `typing`, whose import takes milliseconds; type checkers know the name

if TYPE_CHECKING:
    from traceproof.api import Report, assert_right, cases, check, definition, judge_file, verify
    from traceproof.errors import TraceproofError
else:

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        module = import_module("traceproof.errors" if name == "TraceproofError" else "traceproof.api")
        globals().update({public: getattr(module, public) for public in __all__ if hasattr(module, public)})
        return globals()[name]

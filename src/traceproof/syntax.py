"""Python's syntax trees, made by one thread at a time."""

import ast
import threading

# CPython 3.11 counts the depth of all trees that are being made in one place: where a thread takes over while
# another's is half made, either ends in "SystemError: AST constructor recursion depth mismatch".
_MAKING = threading.RLock()


def parsed(source: str | bytes) -> ast.Module:
    """`ast.parse`, also for threads side by side; raises as that does."""
    with _MAKING:
        return ast.parse(source)

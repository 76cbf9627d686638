"""Tables for a terminal."""

from collections.abc import Iterable

from rich.table import Table


def headed(title: str, words: Iterable[str], numbers: Iterable[str] = (), *last: str) -> Table:
    """A table with columns of words, columns of numbers, which stand to the right, and further ones of words."""
    grid = Table(title=title, title_justify="left")
    for name in words:
        grid.add_column(name)
    for name in numbers:
        grid.add_column(name, justify="right")
    for name in last:
        grid.add_column(name)
    return grid

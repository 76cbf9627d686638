"""The rule graph for people: what `snakemake chain --rulegraph mermaid-js` gives, by the rules' names.

Snakemake knows what stands behind a checkpoint only once that has run, and what stands before it only until then.
So its graphs of a fresh clone and of a finished one are put together:

    python scripts/rule_graph.py fresh.txt finished.txt
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

NODE = re.compile(r"^\s*(id\d+)\[(\w+)\]", re.MULTILINE)
EDGE = re.compile(r"^\s*(id\d+) --> (id\d+)", re.MULTILINE)
VARIANT = re.compile(r"^actor_\w+$")  # the same rule with another priority


def edges(text: str) -> set[tuple[str, str]]:
    """Pairs of rules, the second reading what the first writes."""
    names = {found[1]: VARIANT.sub("actor", found[2]) for found in NODE.finditer(text)}
    return {(names[found[1]], names[found[2]]) for found in EDGE.finditer(text)}


def picture(found: set[tuple[str, str]]) -> str:
    """A Mermaid flowchart."""
    return "".join(["flowchart TD\n", *(f"    {one} --> {other}\n" for one, other in sorted(found))])


if __name__ == "__main__":
    sys.stdout.write(
        picture(set().union(*(edges(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:])))
    )

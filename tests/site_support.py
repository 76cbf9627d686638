"""A finished run for the tests of the site: some definitions pass, one fails, one says what a stranger may say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from definitions import GOOD, rmsnorm, write
from publish_support import finished, row

from traceproof.dataset.tree import read_tree
from traceproof.run.report import report
from traceproof.site.build import Finished

HOSTILE = '</script><script>hacked=1</script><img src=x onerror="hacked=1"> {{ 7*7 }} \'"&\u2028'
BROKEN = "<img src=x onerror=hacked=1>"  # name of a file that is no definition
NAMES = ("alpha", "beta", "gamma", "zeta")
IMPLEMENTATIONS = ("reference", "torch", "flashinfer")
HISTOGRAM = [0] * 20 + [7, 5, 0, 0, 1]


def stack(name: str, package: str, version: str) -> dict[str, Any]:
    """A stack's record, as far as anything here reads it."""
    versions = {package: version, "hostile": HOSTILE}
    return {"stack": name, "digest": f"{name} {version}", "versions": versions, "device": "NVIDIA TEST"}


def rows_of(name: str, digest: str, version: str) -> Iterator[dict[str, Any]]:
    """Two cases of three implementations: flashinfer is skipped, and gamma's reference fails the second one."""
    for case in ("small-0", "small-1"):
        for implementation in IMPLEMENTATIONS:
            found = row(
                name, digest, case, implementation, versions={"torch": "2.13.0", "flashinfer-python": version}
            )
            if implementation == "flashinfer":
                found |= {"output": "*", "verdict": "skip", "reason": "no_cuda", "message": "needs a CUDA device"}
                found.pop("gate")
            elif name == "gamma" and implementation == "reference" and case == "small-1":
                found |= {"verdict": "fail", "reason": "numerics", "message": HOSTILE, "replay": HOSTILE}
                found |= {"gate": {"kind": "baseline", "margin": 41.0}}
                found |= {"worst": [{"index": [4, 17], "expected": 0.1132, "actual": "nan"}]}
            if implementation != "flashinfer":
                found["metrics"] = {"max_abs": 0.125, "histogram": HISTOGRAM}
            yield found


def hostile(name: str) -> dict[str, Any]:
    """A definition that says everything that a name may not."""
    definition = rmsnorm(name, GOOD + f"\n# {HOSTILE!r} </code></pre>\n", description=HOSTILE)
    definition["tags"] = ["model:<b>x</b>", "model:tiny", 'stage:"><script>hacked=1</script>']
    definition["inputs"]["weight"]["description"] = HOSTILE
    definition["inputs"]["hidden_states"]["description"] = "Rows; epsilon 1e-6."
    definition["axes"]["batch_size"]["description"] = HOSTILE
    return definition


def site_run(folder: Path) -> Finished:
    """A run of NAMES, in which gamma fails, and a file that is no definition."""
    dataset = folder / "dataset"
    for name in NAMES:
        definition = hostile(name) if name == "zeta" else rmsnorm(name, tags=["model:tiny", "tp:2"])
        write(dataset, definition)
    (dataset / "definitions" / "rmsnorm" / f"{BROKEN}.json").write_text("{}")
    entries = read_tree(dataset).definitions
    results = folder / "results"
    rows = [found for name in NAMES for found in rows_of(name, entries[name].definition.digest, "0.7")]
    broken = {"verdict": "error", "reason": "bad_definition", "message": HOSTILE, "path": f"x/{BROKEN}.json"}
    rows.append(
        {"definition": BROKEN, "op_type": "rmsnorm", "case": None, "implementation": "reference", "output": "*"}
        | broken
    )
    finished(results, dataset, rows)
    stacks = [stack("torch", "torch", "2.13.0")]
    report([results / "verdicts" / "rmsnorm.jsonl"], results / "summary.json", known=None, stacks=stacks)
    for record in stacks:
        (results / "stacks").mkdir(exist_ok=True)
        (results / "stacks" / f"{record['stack']}.json").write_text(json.dumps(record))
    return Finished(results, results)


@dataclass
class Page(HTMLParser):
    """A page as a browser's parser sees it, as far as the tests look.

    Attributes:
        links: of href and src.
        tags: every element and its attributes.
        text: what stands outside of scripts.
        data: what stands in scripts.
    """

    links: list[str] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    text: str = ""
    data: list[str] = field(default_factory=list)
    _script: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def read(cls, path: Path) -> Page:
        """The page of a file."""
        page = cls()
        page.feed(path.read_text(encoding="utf-8"))
        page.close()
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        self.links += [str(found[name]) for name in ("href", "src") if name in found]
        self._script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._script = self._script and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._script:
            self.data.append(data)
        else:
            self.text += data

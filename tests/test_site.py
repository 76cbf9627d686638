"""The site: every definition has its page, every link leads somewhere, what a stranger wrote is never markup."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest
from definitions import GOOD, rmsnorm, write
from publish_support import finished, row

from traceproof.dataset.tree import read_tree
from traceproof.errors import TraceproofError
from traceproof.names import path_part
from traceproof.run.report import report
from traceproof.run.schema import VerdictRow
from traceproof.site.build import Built, Finished, View, build

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


@pytest.fixture(scope="module")
def built_run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return site_run(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def built(built_run: Finished) -> Built:
    return build(built_run, built_run.run / "site")


@pytest.fixture(scope="module")
def pages(built: Built) -> dict[str, Page]:
    return {str(path.relative_to(built.folder)): Page.read(path) for path in built.folder.rglob("*.html")}


def table(page: Page) -> dict[str, Any]:
    """The data of a page's table."""
    (text,) = page.data
    found: dict[str, Any] = json.loads(text)
    return found


def test_every_definition_has_a_page_and_stands_in_the_lists(pages: dict[str, Page], built: Built) -> None:
    assert built.pages == len(pages)
    for name in (*NAMES, BROKEN):
        page = pages[f"definitions/{path_part(name)}.html"]
        assert name in page.text
        assert f"../definitions/{path_part(name)}.html" in pages["op_types/rmsnorm.html"].links
    overview = table(pages["index.html"])
    assert {row[0][0] for row in overview["rows"]} == {*NAMES, BROKEN}
    assert all(any(row[overview["results"] :]) for row in overview["rows"])


def test_every_link_leads_to_a_file_of_the_site_and_nowhere_else(pages: dict[str, Page], built: Built) -> None:
    for path, page in pages.items():
        for link in page.links:
            if link == "data:,":
                continue
            target, _ = urldefrag(link)
            assert "://" not in link, f"{path} names {link}"
            assert (built.folder / path).parent.joinpath(unquote(target or Path(path).name)).is_file(), (
                f"{path}: {link}"
            )
    for asset in built.folder.glob("assets/*"):
        text = asset.read_text(encoding="utf-8")
        assert "fetch(" not in text, asset.name
        assert "XMLHttpRequest" not in text, asset.name


def test_what_strangers_wrote_is_shown_and_is_never_markup(pages: dict[str, Page]) -> None:
    for path, page in pages.items():
        assert not [tag for tag, _ in page.tags if tag in {"img", "iframe", "object", "embed", "base"}], path
        assert not [name for _, found in page.tags for name in found if name.startswith("on")], path
        sources = [found for tag, found in page.tags if tag == "script"]
        assert all(one.get("type") == "application/json" or "assets/" in str(one.get("src")) for one in sources)
        assert not [text for text in page.data if "<" in text], path
    zeta, gamma = pages["definitions/zeta.html"], pages["definitions/gamma.html"]
    assert HOSTILE in zeta.text
    assert "</code></pre>" in zeta.text
    assert HOSTILE in gamma.text
    assert pages["models.html"].text.count("<b>x</b>") >= 1


def test_a_page_holds_nothing_that_the_browser_may_run_but_the_site_s_own_files(pages: dict[str, Page]) -> None:
    for page in pages.values():
        (policy,) = [found["content"] for tag, found in page.tags if found.get("http-equiv")]
        assert policy is not None
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy


def test_a_failing_definition_s_page_has_its_finding_margins_and_command(pages: dict[str, Page]) -> None:
    page = pages["definitions/gamma.html"]
    assert "new: reference, case small-1, output" in page.text
    assert "[4, 17]" in page.text
    assert "traceproof verify --definition-name gamma --case small-1" in page.text
    plots = {one["kind"]: one for one in map(json.loads, page.data)}
    assert plots["margins"]["labels"] == ["small-0", "small-1"]
    assert ["reference: output", [0.25, 41.0]] in plots["margins"]["series"]
    (_, counts), *_ = plots["histogram"]["series"]
    assert counts[20:22] == [14, 10]
    assert len(plots["histogram"]["labels"]) == len(counts)


def test_models_and_findings_name_the_definitions(pages: dict[str, Page]) -> None:
    assert "3 of 4 definitions verified" in pages["models/tiny.html"].text
    assert [one[0][0] for one in table(pages["findings.html"])["rows"]] == ["gamma", BROKEN]


def test_a_site_is_made_anew_and_a_folder_of_somebody_else_stays(built_run: Finished, tmp_path: Path) -> None:
    folder = build(built_run, tmp_path / "site").folder
    (folder / "definitions" / "old.html").touch()
    build(built_run, folder)
    assert not (folder / "definitions" / "old.html").exists()
    foreign = tmp_path / "mine"
    foreign.mkdir()
    (foreign / "thesis.txt").touch()
    with pytest.raises(TraceproofError, match="is in the way"):
        build(built_run, foreign)
    assert (foreign / "thesis.txt").exists()


def test_verdicts_that_the_summary_does_not_stand_on_are_refused(tmp_path: Path) -> None:
    run = site_run(tmp_path)
    (run.run / "verdicts" / "rmsnorm.jsonl").write_text("")
    with pytest.raises(TraceproofError, match="is not of the verdicts that are there"):
        build(run, tmp_path / "out")


def test_without_a_finished_run_the_error_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "selections" / "gemm-1a2b3c4d").mkdir(parents=True)
    with pytest.raises(TraceproofError) as refused:
        build(Finished(tmp_path, tmp_path), tmp_path / "out")
    assert "there is no finished run to show" in str(refused.value)
    assert "by --selection: selections/gemm-1a2b3c4d." in str(refused.value)
    assert "it was interrupted" in str(refused.value)
    assert "traceproof verify" in str(refused.value)


def test_a_definition_that_ends_in_an_error_at_its_own_size_is_not_called_too_large() -> None:
    of = {
        "definition": "a",
        "op_type": "sampling",
        "case": "small-0",
        "implementation": "reference",
        "output": "*",
    }
    small = VerdictRow.model_validate({**of, "verdict": "pass", "scaled_down": "vocab_size 131072 -> 256"})
    about: dict[str, Any] = {"outcome": "", "grade": "", "kinds": {}, "planned": None, "verdicts": {}}
    for verdict, said in (("error", ""), ("skip", small.scaled_down)):
        rows = [VerdictRow.model_validate({**of, "verdict": verdict}), small]
        assert View(name="a", op_type="sampling", rows=rows, **about).scaled_down == said

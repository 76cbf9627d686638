"""The site: every definition has its page, every link leads somewhere, what a stranger wrote is never markup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest
from site_support import BROKEN, HOSTILE, NAMES, Page, site_run

from traceproof.errors import TraceproofError
from traceproof.names import path_part
from traceproof.site.build import Built, Finished, build


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return site_run(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def built(finished: Finished) -> Built:
    return build(finished, finished.run / "site")


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


def test_a_site_is_made_anew_and_a_folder_of_somebody_else_stays(finished: Finished, tmp_path: Path) -> None:
    folder = build(finished, tmp_path / "site").folder
    (folder / "definitions" / "old.html").touch()
    build(finished, folder)
    assert not (folder / "definitions" / "old.html").exists()
    foreign = tmp_path / "mine"
    foreign.mkdir()
    (foreign / "thesis.txt").touch()
    with pytest.raises(TraceproofError, match="is in the way"):
        build(finished, foreign)
    assert (foreign / "thesis.txt").exists()


def test_verdicts_that_the_summary_does_not_stand_on_are_refused(tmp_path: Path) -> None:
    run = site_run(tmp_path)
    (run.run / "verdicts" / "rmsnorm.jsonl").write_text("")
    with pytest.raises(TraceproofError, match="is not of the verdicts that are there"):
        build(run, tmp_path / "out")


def test_without_a_finished_run_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TraceproofError) as refused:
        build(Finished(tmp_path, tmp_path), tmp_path / "out")
    assert "there is no finished run to show" in str(refused.value)
    assert "it was interrupted" in str(refused.value)
    assert "traceproof verify" in str(refused.value)

"""Building the site: every page written once, by a template that escapes whatever it is given."""

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters.html import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexers.python import PythonLexer  # type: ignore[import-untyped]

from traceproof.files import write_text
from traceproof.names import fresh_folder, path_part

HERE = Path(__file__).parent
HEAD: Sequence[tuple[str, str]] = (
    ("index.html", "Overview"),
    ("findings.html", "Findings"),
    ("models.html", "Models"),
    ("bumps.html", "Bumps"),
    ("ledger.html", "Ledger"),
    ("audit.html", "Public tests"),
)
ALONE = ("site.css", "uplot.css", "uplot.js", "plots.js")  # of a page that stands alone
LONGEST = 200_000  # characters of a source that are highlighted; a longer one is shown plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What was written."""

    folder: Path
    pages: int
    bytes: int
    seconds: float


@dataclass
class Pages:
    """The folder of a site that is being built."""

    folder: Path  # made anew
    sentence: str  # what the run ended with; stands below every page
    _count: int = field(default=0, init=False)
    _bytes: int = field(default=0, init=False)
    _started: float = field(default_factory=time.monotonic, init=False)

    def __post_init__(self) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        fresh_folder(self.folder, within=self.folder.parent)
        shutil.copytree(HERE / "assets", self.folder / "assets")
        self._bytes = sum(path.stat().st_size for path in (self.folder / "assets").iterdir())
        for name in ("definitions", "op_types", "models", "bumps"):
            (self.folder / name).mkdir()

    @cached_property
    def _templates(self) -> Environment:
        found = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        found.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
        found.globals |= {"pages": HEAD, "sentence": self.sentence, "slug": path_part}
        return found

    def write(self, path: str, template: str, **values: Any) -> None:  # noqa: ANN401 - what the template takes
        """Write a page; `path` is relative to the folder, with at most one folder in it."""
        root = "../" * path.count("/")
        text = self._templates.get_template(f"{template}.html.j2").render(here=path, root=root, **values)
        data = text.encode("utf-8", "replace")
        (self.folder / path).write_bytes(data)
        self._count += 1
        self._bytes += len(data)

    def alone(self, path: Path, template: str, **values: Any) -> None:  # noqa: ANN401 - what the template takes
        """Write a page that holds its style and scripts, at a path outside of the folder."""
        assets = {name: (HERE / "assets" / name).read_text(encoding="utf-8") for name in ALONE}
        inline = {name.replace(".", "_"): Markup(text) for name, text in assets.items()}  # noqa: S704 - ours
        text = self._templates.get_template(f"{template}.html.j2").render(**inline, **values)
        write_text(path, text)

    def table(self, path: str, title: str, told: str, data: Mapping[str, Any]) -> None:
        """Write a page with one table that the browser pages, sorts and filters."""
        self.write(path, "table", title=title, told=told, data=data)

    @property
    def built(self) -> Built:
        """What was written so far."""
        seconds = time.monotonic() - self._started
        return Built(folder=self.folder, pages=self._count, bytes=self._bytes, seconds=seconds)


def rows(columns: Sequence[str], facets: Sequence[str], found: Iterator[Sequence[Any]]) -> dict[str, Any]:
    """Data of a table: `facets` are the columns that have a filter of their own."""
    return {"columns": list(columns), "facets": [columns.index(name) for name in facets], "rows": list(found)}


def link(name: str, folder: str = "definitions") -> list[str]:
    """A cell that leads to a page of the site: its text and, from the site's folder, its address."""
    return [name, f"{folder}/{path_part(name)}.html"]


def highlighted(source: str) -> Markup | str:
    """Python source as HTML with classes; Pygments escapes it."""
    if len(source) > LONGEST:
        return source
    return Markup(highlight(source, PythonLexer(), HtmlFormatter(nowrap=True)))  # noqa: S704 - escaped by Pygments

"""Hook of mkdocs: the pages that are made from the code.

`nox -s docs` builds the site. Written are the command line, config.yaml, the columns of a verdict row, and one
page per lint code.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer.cli import get_docs_for_click

from traceproof.cli import command_line
from traceproof.lint.model import Code, Severity, codes
from traceproof.run.schema import VerdictRow

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[1]
LINT = "reference/lint"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the section whose pages are not written by hand."""
    sections = {
        "Reference": [
            {"Command line": "reference/command-line.md"},
            {"config.yaml": "reference/config.md"},
            {"Verdict rows": "reference/verdicts.md"},
            {"Lint codes": [f"{LINT}/index.md", *(f"{LINT}/{code}.md" for code in codes(""))]},
        ],
    }
    nav: list[dict[str, object]] = config.nav or []
    config.nav = [{name: sections.get(name, pages) for name, pages in entry.items()} for entry in nav]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Markdown of every page that is made, by its path below docs/."""
    known = codes("").values()
    config = (ROOT / "config.yaml").read_text(encoding="utf-8")
    listed = "\n".join(f"| [{one.code}]({one.code}.md) | {one.title} | {one.severity} |" for one in known)
    index = f"# Lint codes\n\n| code | finds what | severity |\n|---|---|---|\n{listed}\n"
    return {
        "reference/command-line.md": _command_line(),
        "reference/config.md": f"# config.yaml\n\n```yaml\n{config}```\n",
        "reference/verdicts.md": _verdicts(),
        f"{LINT}/index.md": index,
        **{f"{LINT}/{one.code}.md": _lint(one) for one in known},
    }


def _lint(one: Code) -> str:
    fails = (
        "It never makes a command fail."
        if one.severity == Severity.NOTE
        else "A command that finds it exits with 1."
    )
    return (
        f"# {one.code}\n\nFinds what {one.title}.\n\n**Severity**: {one.severity}. {fails}\n\n"
        f"**What to do**: {one.todo}.\n"
    )


# What a field of a record is: beside it, or above several of them, which it names.
MEANING = re.compile(r"^    (?:([a-z_]+): .*  # |# ([a-z_, ]+): )(.+)$", re.MULTILINE)


def _command_line() -> str:
    command = typer.main.get_command(command_line(()))
    context = typer.Context(command, info_name="traceproof")
    return get_docs_for_click(obj=command, ctx=context, name="traceproof", title="Command line")


def _verdicts() -> str:
    rows = [
        f"| `{field.alias or name}` | `{_type(field.annotation)}` | {'always' if field.is_required() else ''} |"
        for name, field in VerdictRow.model_fields.items()
    ]
    source = inspect.getsource(VerdictRow)
    meanings = "\n".join(f"- {names or listed}: {said}" for names, listed, said in MEANING.findall(source))
    text = (VerdictRow.__doc__ or "").strip()
    head = f"# Verdict rows\n\n{text} `results/verdicts/<op_type>.jsonl` holds one JSON object per row.\n"
    return "\n".join([head, meanings, "", "| column | type | there |", "|---|---|---|", *rows, ""])


def _type(annotation: object) -> str:
    name = annotation.__name__ if isinstance(annotation, type) and "[" not in str(annotation) else str(annotation)
    return name.replace("typing.", "").replace("traceproof.run.schema.", "").replace("|", "or")

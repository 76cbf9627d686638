"""The text of the repository: names in their own files, what rules quote, pages made from the code."""

from __future__ import annotations

import ast
import importlib.util
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.settings import OutputSettingsLoggerInterface
from typer.main import get_group

from snakemake_logger_plugin_traceproof import LogHandler
from traceproof.cli import command_line
from traceproof.lint.model import codes
from traceproof.ops import registry
from traceproof.run.entry import UNFINISHED
from traceproof.run.schema import VerdictRow
from traceproof.stacks import ENVIRONMENTS, STACKS, TRUTHS

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "traceproof"
KNOWN = frozenset(registry.known())
# What else is called as an op_type is: a keyword of transformers' attention, a definition's tag.
FOREIGN = {
    (SOURCE / "extract/bootstrap/transformers_model.py", "softcap"),
    (SOURCE / "lint/dataset.py", "quantization"),
    (SOURCE / "extract/pipeline.py", "mamba"),
    (SOURCE / "ops/families/product.py", "activation"),  # a fact of a module, as SGLang names it
    *(  # as a word for a number
        (SOURCE / f"{name}.py", "topk")
        for name in (
            "extract/bootstrap/transformers_model",
            "extract/merge",
            "ops/families/attention",
            "ops/families/routing",
            "run/shadow",
        )
    ),
}
QUOTED = re.compile(r"""["']([a-z_]+)["']""")
# Names of other things too (a package, a device, a command), which count where a stack is asked for.
AMBIGUOUS = {"torch", "cpu", "extract"}
NAMES = {*STACKS, *TRUTHS, *ENVIRONMENTS} - AMBIGUOUS
# The bootstrap is what runs inside the stack that reads models.
OF_STACKS = ("src/traceproof/stacks/", "src/traceproof/ops/", "src/traceproof/extract/bootstrap/")
WORD = re.compile(rf"(?<![\w-])({'|'.join(sorted(NAMES, key=len, reverse=True))})(?![\w-])")
ASKED = re.compile(r"""\b(python|environment|record|resolve|interpreter|stacks)[\[(]["'](torch|cpu|extract)["']""")
RULES = [ROOT / "Snakefile", *sorted((ROOT / "rules").glob("*.smk"))]
PYTHON = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").glob("*.py"), ROOT / "noxfile.py"])


def words(path: Path) -> Iterator[tuple[int, str]]:
    """Texts, and names of modules of ops, with their lines; not what comments and docstrings say."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        for number, line in enumerate(text.splitlines(), 1):
            yield from ((number, word) for word in QUOTED.findall(line.partition("#")[0]))
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("traceproof.ops"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, part) for part in parts)


def test_no_place_names_an_op_type_outside_its_own() -> None:
    # A package's function may be called as an op_type is: its name is a key of the stack's table.
    functions = {key for stack in STACKS.values() for key in stack.apis}
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in (*RULES, *PYTHON)
        for line, word in words(path)
        if word in KNOWN and path != registry.file_of(word)
        if not (word in functions and path.is_relative_to(SOURCE / "stacks")) and (path, word) not in FOREIGN
    ]
    assert not found, "\n".join(found)


def stacks_in(path: Path) -> Iterator[str]:
    """Texts that are a stack's name, or a dotted path or an option that begins with one; docstrings aside."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        code = (line.partition("#")[0] for line in text.splitlines())
        yield from (line for line in code if WORD.search(line) or ASKED.search(line))
        return
    yield from (found[0] for found in ASKED.finditer(text))
    tree = ast.parse(text)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            if " " not in node.value and WORD.search(node.value):
                yield f"line {node.lineno}: {node.value!r}"
        elif (
            isinstance(node, ast.Attribute) and node.attr in STACKS and ast.unparse(node.value).endswith("stacks")
        ):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_no_place_names_a_stack_outside_its_own() -> None:
    paths = [path for path in PYTHON if not path.relative_to(ROOT).as_posix().startswith(OF_STACKS)]
    found = [f"{path.relative_to(ROOT)}: {said}" for path in (*RULES, *paths) for said in stacks_in(path)]
    assert not found, "\n".join(found)


FILES = [ROOT / "Snakefile", *sorted((ROOT / "rules").glob("*.smk"))]
COMMAND = re.compile(r"(?m)^ +shell:\n((?: +\".*\"\n)+)")
PLACEHOLDER = re.compile(r"(?<!\{)\{([^{}]+)\}")


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_every_placeholder_of_a_command_is_quoted(file: Path) -> None:
    text = file.read_text()
    commands = COMMAND.findall(text)
    assert len(commands) == text.count("    shell:\n")
    bare = [name for command in commands for name in PLACEHOLDER.findall(command) if not name.endswith(":q")]
    assert bare == []


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_no_rule_asks_for_cores_before_it_runs(file: Path) -> None:
    """A batch system has none to tell: the Snakefile would end with an error there."""
    assert re.findall(r"(?m)^ +threads: .*workflow\.cores", file.read_text()) == []


def test_a_run_that_fails_on_a_full_disk_says_so_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = LogHandler(cast("OutputSettingsLoggerInterface", None), None)
    failure = {"event": LogEvent.JOB_ERROR, "log": [str(tmp_path / "log")]}
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 19))
    for number, name in enumerate(("cases", "verify", "site", "tests")):
        handler.emit(logging.makeLogRecord(failure | {"jobid": number, "rule_name": name}))
    with pytest.raises(SystemExit) as ended:
        handler.end()
    assert ended.value.code == UNFINISHED
    last = capsys.readouterr().err.splitlines()[-1]
    named = "cases, verify, site and 1 more failed"
    assert last.startswith(f"The run could not finish: {named}; 0.5 MiB are free in {tmp_path}.")


SCRIPT = Path(__file__).parents[1] / "docs" / "pages.py"


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pages", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(hook: ModuleType) -> dict[str, str]:
    made: dict[str, str] = hook.pages()
    return made


def test_every_lint_code_has_a_page_of_its_own_and_a_line_in_the_list(pages: dict[str, str]) -> None:
    known = codes("")
    assert len(known) > 50
    for code, stated in known.items():
        assert stated.todo in pages[f"reference/lint/{code}.md"]
        assert f"[{code}]({code}.md)" in pages["reference/lint/index.md"]


def test_every_command_stands_in_the_command_lines_reference(pages: dict[str, str]) -> None:
    names = [command.name for command in command_line(()).registered_commands]
    assert len(names) > 10
    assert [name for name in names if f"`traceproof {name}`" not in pages["reference/command-line.md"]] == []


def test_every_column_of_a_verdict_row_has_a_type_and_a_meaning(pages: dict[str, str]) -> None:
    text = pages["reference/verdicts.md"]
    meanings = [line.partition(":")[0] for line in text.splitlines() if line.startswith("- ")]
    said = {name.strip() for line in meanings for name in line.removeprefix("- ").split(",")}
    assert said == set(VerdictRow.model_fields)
    assert all(f"| `{field.alias or name}` | `" in text for name, field in VerdictRow.model_fields.items())


def test_every_known_finding_and_every_repeat_stands_on_the_page_of_findings() -> None:
    root = SCRIPT.parents[1]
    text = (root / "docs" / "findings.md").read_text(encoding="utf-8")
    whys = re.findall(r'why: "([A-Z]\d+)\b', (root / "known.yaml").read_text(encoding="utf-8"))
    assert len(set(whys)) > 10
    assert {name for name in whys if not re.search(rf"\b{name}\b", text)} == set()
    repeats = {path.name for path in (root / "docs" / "repeats").glob("*.py")}
    assert {name for name in repeats if name not in text and not name.startswith("flashinfer-mla_")} == set()


def test_every_option_on_the_specifications_page_is_there(pages: dict[str, str]) -> None:
    root = SCRIPT.parents[1]
    text = (root / "docs" / "specification.md").read_text(encoding="utf-8")
    conftest = (root / "src" / "traceproof" / "testgen" / "conftest.py.in").read_text(encoding="utf-8")
    known = pages["reference/command-line.md"] + conftest
    options = set(re.findall(r"`[^`\n]*?(--[a-z][a-z-]+)", text)) - {"--tb"}  # pytest's own
    assert len(options) > 25
    assert {option for option in options if not re.search(rf"{option}\b", known)} == set()


TOLD = re.compile(r"`((?:traceproof|nox|snakemake|python3?) [^`|]+)`|(?ms:^```(?:ba)?sh\n(.*?)^```)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
COMMANDS = {
    name: {"--help", *(option for parameter in command.params for option in parameter.opts)}
    for name, command in get_group(command_line(())).commands.items()
}
TARGETS = {name for file in FILES for name in re.findall(r"(?m)^(?:local)?rule (\w+):", file.read_text())}
SESSIONS = {
    *re.findall(r'session\(name="(\w+)"', (ROOT / "noxfile.py").read_text()),
    *(f"test_{family}" for family in (*registry.families(), "<family>")),
}


def is_there(command: str) -> bool | None:
    """Whether a command of ours exists with its options; None: it is no command of ours."""
    program, *words = command.partition(" #")[0].split() or [""]
    given = {word for word in words[: words.index("--") if "--" in words else None] if OPTION.fullmatch(word)}
    match program, words:
        case "traceproof", [name, *_] if re.fullmatch(r"[a-z][a-z-]*", name):
            return name in COMMANDS and given <= COMMANDS[name]
        case "snakemake", [*_, last] if re.fullmatch(r"[a-z_]+", last):
            return last in TARGETS
        case "nox", ["-s", session, *_]:
            return session.strip('"').partition("(")[0] in SESSIONS
        case "python" | "python3", [script, *_] if script.startswith(("lab/", "scripts/", "docs/")):
            text = (ROOT / script).read_text() if (ROOT / script).is_file() else ""
            beside = (
                (ROOT / script).with_name(f"{name}.py") for name in re.findall(r"(?m)^from (\w+) import", text)
            )
            text += "".join(path.read_text() for path in beside if path.is_file())  # several share a command line
            return bool(text) and (script.startswith("scripts/") or all(f'"{one}"' in text for one in given))
    return None


def test_every_command_that_docs_and_messages_tell_of_is_there_with_its_options() -> None:
    pages = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *SOURCE.rglob("*.py"))
    told = {
        (path.name, " ".join(line.split())): is_there(line)
        for path in pages
        for inline, block in TOLD.findall(path.read_text(encoding="utf-8"))
        for line in (inline, *re.split(r"\n|&&", block))
    }
    assert [command for command, there in told.items() if there is False] == []
    assert sum(there is True for there in told.values()) > 100

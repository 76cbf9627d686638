"""What every command answers to wrong use: exit code 2, one message that names what is wrong and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from repository import DEFINITIONS, Repository
from ruamel.yaml import YAML

from traceproof.cli import main

# Command, and a part of the answer that names what is wrong. {tmp} is a folder with: `file` (text), `empty` (a
# folder), `dataset` (one definition), `git` (a folder that is no repository), `kernels`.
USES: list[tuple[str, str]] = [
    # No such command, option or value.
    ("", "Usage"),
    ("verfiy", "No such command"),
    ("verify --no-such-option", "--no-such-option"),
    ("verify --cores 0", "--cores"),
    ("extract-kernel-definitions --model-name llama_3_1_8b --tp two", "--tp"),
    ("judge {tmp}/kernels --hidden-seed 0", "--hidden-seed"),
    ("judge {tmp}/solution.py", "does not say which definition it implements"),
    ("judge {tmp}/solution.py --definition rmsnorm_h96 --stack none", "--stack none"),
    ("judge {tmp}/solution.py::other", "it has no function other"),
    ("judge {tmp}/solution.py --definition aten::relu::float33", "close to it: float32"),
    ("judge {tmp}/solutions", "not judged: {tmp}/solutions/b.py does not say which definition"),
    ("judge {tmp}/solution.py --demand nothing", "--demand nothing: properties are determinism"),
    ("add-reference-tests --all --tolerance nan", "--tolerance nan: expected a finite number from 0"),
    ("diff {tmp}/number.json {tmp}/number.json", "holds no kept verdicts"),
    ("check-certificate {tmp}/number.json", "'{tmp}/number.json.sig' A certificate is signed when it is written"),
    ("add-new-model --model-name deepseek-v3 --models-ts {tmp}/models.ts", "does not exist"),
    ("tactics --truth flashinfr", "known: flashinfer, sglang, fla, torch"),
    ("clone-repos flashinfer --url flashinfer=https://[x", "flashinfer"),
    ("judge {tmp}/empty", "{tmp}/empty holds no solutions"),
    # Values that do not fit.
    ("verify --tolerance -0.1", "tolerance: -0.1"),
    ("verify --test-sizes huge", "test_sizes"),
    ("verify --op-type gmm", "did you mean 'gemm'?"),
    ("verify --all --op-type rmsnorm", "--all selects everything"),
    ("verify rmsnorm --op-type gemm", "Give names, files and folders, or these options"),
    ("verify rmsnrom", "close to it: rmsnorm_h96"),
    ("verify {tmp}/nowhere.json", "there is no file or folder {tmp}/nowhere.json"),
    ("verify {tmp}/empty/", "{tmp}/empty is not a dataset"),
    ("verify {tmp}/file.json", "file.json: not JSON"),
    ("add-reference-tests --test-sizes huge --all", "--test-sizes huge"),
    ("extract-kernel-definitions --model-name no_such_model", "no_such_model"),
    ("extract-kernel-definitions", "--model-name"),
    ("clone-repos nothing", "nothing"),
    ("clone-repos flashinfer --commit flashinfer=abc", "abc"),
    ("clone-repos flashinfer --url flashinfer=--upload-pack=x", "--upload-pack"),
    ("clone-repos flashinfer --tag flashinfer=v1 --branch flashinfer=main", "flashinfer"),
    ("clone-repos flashinfer --release flashinfer", "flashinfer"),
    ("lint --select XX9", "XX9"),
    ("dependents --root {tmp}/empty --between A B --changed x.py", "--between"),
    # Names that are not there.
    ("show rmsnorm_h96", "no verdicts of 'rmsnorm_h96'"),
    ("diff feed beef", "no verdicts are kept in"),
    ("bisect --definition nope --good a --bad b --repository {tmp}/git", "nope"),
    ("bisect --definition rmsnorm_h96 --good a --bad b --repository {tmp}/git", "{tmp}/git"),
    ("add-reference-tests --definition-name nope", "nope"),
    # Files and folders that are not there, or of the wrong kind.
    ("verify --dataset {tmp}/nowhere", "{tmp}/nowhere"),
    ("verify --dataset {tmp}/empty", "holds no definitions"),
    ("lint --dataset {tmp}/nowhere", "{tmp}/nowhere"),
    ("lint --baseline {tmp}/file", "{tmp}/file"),
    ("lint --flashinfer-path {tmp}/nowhere", "{tmp}/nowhere"),
    ("lint-kernels {tmp}/nowhere", "{tmp}/nowhere"),
    ("lint-kernels {tmp}/empty", "{tmp}/empty holds no Python files"),
    ("audit-tests {tmp}/nowhere", "{tmp}/nowhere"),
    ("audit-tests {tmp}/empty", "dataset"),
    ("coverage --tests {tmp}/nowhere", "{tmp}/nowhere does not exist"),
    ("coverage --tests {tmp}/dataset --python {tmp}/nowhere", "{tmp}/nowhere"),
    ("diff {tmp}/file {tmp}/file", "{tmp}/file"),
    ("dependents --root {tmp}/empty", "--changed"),
    ("dependents --root {tmp}/git --between A B", "{tmp}/git"),
    ("dependents --root {tmp}/kernels --changed k.py --dataset {tmp}/nowhere", "{tmp}/nowhere"),
    ("add-reference-tests --definitions-dir {tmp}/nowhere", "{tmp}/nowhere"),
    ("add-reference-tests --repos-config {tmp}/file", "{tmp}/file"),
    ("add-reference-tests --flashinfer-path {tmp}/empty", "{tmp}/empty"),
    ("add-new-model --model-name x --config {tmp}/nowhere", "{tmp}/nowhere"),
    ("extract-kernel-definitions --model-name x --config {tmp}/nowhere", "{tmp}/nowhere"),
    ("clone-repos --lock {tmp}/file", "{tmp}/file"),
    ("publish --dataset {tmp}/dataset", "which run verified it is not said"),
    ("publish --traces {tmp}/nowhere", "{tmp}/nowhere"),
    # JSON that is nested too deeply to be read.
    ("lint --baseline {tmp}/deep.json", "{tmp}/deep.json"),
    ("add-reference-tests --repos-config {tmp}/deep.json", "{tmp}/deep.json"),
    ("add-new-model --model-name x --config {tmp}/deep.json", "{tmp}/deep.json"),
    ("clone-repos --lock {tmp}/deep.json", "{tmp}/deep.json"),
    ("verify {tmp}/deep.json", "{tmp}/deep.json"),
    ("judge {tmp}/deep.json --definition {tmp}/deep.json", "{tmp}/deep.json"),
    # What can not be written, found before the work.
    ("verify --json {tmp}/nowhere/out.json", "--json {tmp}/nowhere/out.json cannot be written"),
    ("diff --markdown {tmp}/nowhere/page.md", "--markdown {tmp}/nowhere/page.md cannot be written"),
    ("clone-repos --target-dir {tmp}/file", "--target-dir {tmp}/file cannot be written"),
    ("extract-kernel-definitions --model-name llama_3_1_8b --output-dir {tmp}/file/x", "dir {tmp}/file/x"),
    ("publish --out {tmp}/file", "--out {tmp}/file cannot be written"),
    ("add-new-model --model-name x --models-ts {tmp}/empty", "--models-ts {tmp}/empty cannot be written"),
]

# Changes of config.yaml, and a part of the answer of `traceproof verify`.
CONFIGS: list[tuple[object, str]] = [
    ({"sizes": 1}, "sizes: unknown key"),
    ({"stacks": {"tortch": {}}}, "stacks.tortch: unknown key; did you mean 'torch'?"),
    ({"stacks": {"torch": {"env": "rocm"}}}, "stacks.torch.env"),
    ({"truths": ["cudnn"]}, "cudnn is no ground truth"),
    ({"solutions": {"demanded": ["speed"]}}, "speed is no property of kernels"),
    ({"limits": {"wall_s": 0}}, "limits.wall_s"),
    ({"limits": {"memory_gb": "much"}}, "limits.memory_gb"),
    ({"dataset": {"path": None, "pypi": None}}, "exactly one of"),
    ({"dataset": {"git": {"url": "x", "commit": "main"}}}, "dataset.git.commit"),
    ({"known": "nowhere.yaml"}, "known"),
    ({"results": "file"}, "file"),
    ({"run": "../elsewhere"}, "run"),
    ({"workloads": "sometimes"}, "workloads"),
    ({"models": ["no_such_model"]}, "no_such_model"),
    ("- a list", "must be a mapping"),
    ("a: [", "config.yaml cannot be used"),
    (None, "config.yaml cannot be used"),  # there is none
]

RIGHT: dict[str, str] = {}  # the copy's config.yaml


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return Repository.copy(tmp_path_factory.mktemp("repository"), dataset={"path": str(DEFINITIONS.parent)})


@pytest.fixture
def tmp(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("no json, no yaml: [\n", encoding="utf-8")
    for name in ("empty", "git", "kernels", "dataset/definitions/rmsnorm", "dataset/tests"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    (tmp_path / "number.json").write_text("1", encoding="utf-8")
    (tmp_path / "file.json").write_text('{"name": "rmsnorm_h9', encoding="utf-8")
    (tmp_path / "kernels" / "k.py").write_text("x = 1\n", encoding="utf-8")
    for name in ("solution.py", "solutions/a.py", "solutions/b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("def run(x):\n    return x\n", encoding="utf-8")
    definition = DEFINITIONS / "rmsnorm" / "rmsnorm_h96.json"
    (tmp_path / "dataset" / "definitions" / "rmsnorm" / definition.name).write_text(definition.read_text())
    return tmp_path


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command says; it must end with 2 and one message."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    said = capsys.readouterr()
    text = said.err + said.out
    assert caught.value.code == 2, text
    assert "Traceback" not in text
    assert 1 <= len(text.strip().splitlines()) <= 60, text
    return " ".join(text.replace("│", " ").split())


@pytest.fixture
def at_home(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The copy as working directory; its config.yaml is put back."""
    monkeypatch.chdir(repository.root)
    monkeypatch.setenv("COLUMNS", "400")
    RIGHT.setdefault("config", (repository.root / "config.yaml").read_text())
    (repository.root / "file").touch()
    return repository.root


@pytest.mark.slow
@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize(("command", "names"), USES, ids=[command for command, _ in USES])
def test_a_wrong_use_is_answered(command: str, names: str, tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [part.replace("{tmp}", str(tmp)) for part in command.split()]
    assert names.replace("{tmp}", str(tmp)) in answer(capsys, *arguments)


@pytest.mark.parametrize(("changes", "names"), CONFIGS, ids=[names for _, names in CONFIGS])
def test_it_is_answered(changes: object, names: str, at_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = at_home / "config.yaml"
    if isinstance(changes, dict):
        config.write_text(json.dumps({**YAML(typ="safe").load(config.read_text()), **changes}))
    elif changes is None:
        config.unlink()
    else:
        config.write_text(str(changes))
    try:
        assert names in answer(capsys, "verify", "--definition-name", "rmsnorm_h96")
    finally:
        config.write_text(RIGHT["config"])

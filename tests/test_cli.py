"""Commands and config.yaml: what may be given, what is told, what a case shows; signed certificates."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from definitions import rmsnorm, write_files
from pipeline import row as row_of
from pipeline import typed
from ruamel.yaml import YAML

from traceproof import programs
from traceproof.cli import main, results, run, spread
from traceproof.cli.verify import folder_of
from traceproof.config import Config, merged, read_config
from traceproof.errors import TraceproofError
from traceproof.judge.kernel_properties import DEMANDED
from traceproof.solutions.signature import check, private_key, sign

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (
            ["verify", "--test-sizes", "small", "medium", "large"],
            "--test-sizes small --test-sizes medium --test-sizes large",
        ),
        (["verify", "--op-type", "a", "b", "--force"], "--op-type a --op-type b --force"),
        (["verify", "--test-sizes", "small", "--", "-n", "x"], "--test-sizes small -- -n x"),
        (["verify", "--op-type", "a", "--op-type", "b"], "--op-type a --op-type b"),
        (["verify", "--json", "f"], "--json f"),
        (["verify", "--test-sizes", "small", "rmsnorm"], "--test-sizes small rmsnorm"),
        (["verify", "--case", "small-0", "edge-empty", "a/b.json"], "--case small-0 --case edge-empty a/b.json"),
        (["verify", "--select", "KL1", "KL2", "kernels"], "--select KL1 --select KL2 kernels"),
    ],
)
def test_several_values_may_follow_one_flag(given: list[str], meant: str) -> None:
    assert spread(given) == ["verify", *meant.split()]


def code_of(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_commands_of_the_driver_import_no_torch() -> None:
    source = "import sys, traceproof.cli, traceproof.run.flow; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], check=False, cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("changes", "folder"),
    [
        ({}, ""),
        ({"force": True}, ""),
        ({"selection": {"all": True}}, ""),
        ({"seed": 0}, ""),
        ({"selection": {"op_type": ["rmsnorm"]}}, "selections/rmsnorm-"),
        ({"seed": 7}, "selections/all-"),
        ({"selection": {"definition_name": ["a/../b"]}}, "selections/a-b-"),
    ],
)
def test_only_another_selection_gets_a_folder_of_its_own(changes: dict[str, Any], folder: str) -> None:
    found = folder_of(run.config_of(ROOT, {}), run.config_of(ROOT, changes), changes)
    assert found.startswith(folder)
    assert bool(found) == bool(folder)


def row(**changes: object) -> dict[str, Any]:
    figures = {"metrics": {"max_abs": 0.125, "within_specification": True}, "specification": {"atol": 0.01}}
    worst = [{"index": [1, 2], "actual": 1.0, "expected": 2.0}]
    told = {"definition": "d", "output": "y", "repeat": "traceproof verify --definition-name d", "worst": worst}
    return row_of(axes={"n": 3}, seed=0, against="oracle", **told | figures | changes)


def test_a_case_is_shown_with_its_outputs_its_worst_place_and_how_to_repeat_it() -> None:
    rows = [row(), row(output="lse", verdict="fail", message="ratio 1.4427")]
    assert list(results.describe(typed(rows), full=False)) == [
        "d, case small-0 (n 3, seed 0), reference",
        "  y    PASS   fine",
        "  lse  FAIL   ratio 1.4427; worst at [1, 2]: oracle 2.0, reference 1.0",
        "  repeat  traceproof verify --definition-name d",
    ]
    text = "\n".join(results.describe(typed([row()]), full=True))
    assert "max_abs 0.125" in text
    assert "within the specification's row (atol 0.01)" in text
    assert "at [1, 2]: oracle 2.0, reference 1.0" in text


def left(folder: Path, dataset: str, *, seconds: float, ended: float | None = None) -> None:
    """What a run leaves of one definition: `seconds` is when it was judged, `ended` when a run last had it."""
    for place in ("verdicts", "cases", "logs"):
        (folder / place).mkdir(parents=True)
    verdicts = folder / "verdicts" / "rmsnorm.jsonl"
    verdicts.write_text(json.dumps(row(message=f"of {dataset}")) + "\n")
    (folder / "cases" / "rmsnorm.json").write_text(json.dumps({"dataset": dataset}))
    os.utime(verdicts, (seconds, seconds))
    if ended is not None:
        log = folder / "logs" / "verify_all.log"
        log.touch()
        os.utime(log, (ended, ended))


def test_show_names_dataset_and_run_and_prefers_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run.configured()[1].model_copy(update={"results": Path("results")})
    monkeypatch.setattr(run, "configured", lambda: (tmp_path, config))
    results = tmp_path / "results"
    left(results, "/old", seconds=1e9)
    left(results / "selections" / "d-1", "/mine", seconds=1.1e9)
    left(
        results / "selections" / "d-2", "/again", seconds=1.05e9, ended=1.2e9
    )  # had nothing to do the second time
    assert code_of(["show", "d"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"d of /again, verified \d{{4}}-.* in {results}/selections/d-2", told[0])
    assert told[1].startswith("  also of /mine, verified ")
    assert told[1].endswith(": `traceproof show d --selection selections/d-1`")
    assert told[2].endswith(": `traceproof show d --selection .`")
    assert told[-1] == "  y  PASS   of /again"
    assert code_of(["show", "d", "--selection", "selections/d-1", "--json", "-"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["dataset"], value["run"]) == ("/mine", f"{results}/selections/d-1")
    assert code_of(["show", "d", "--selection", "."]) == 0
    assert "d of /old, verified" in capsys.readouterr().out


def test_a_name_that_is_none_is_written_as_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    dataset = str(ROOT / "tests" / "dataset")
    assert code_of(["verify", "rmsnrom", "--dataset", dataset, "--json", "-"]) == 2
    said = capsys.readouterr()
    value = json.loads(said.out)
    assert value["exit_code"] == 2
    assert value["error"].strip() == said.err.strip()
    assert "close to it: rmsnorm_h96" in value["error"]


def test_verify_says_at_once_what_is_judged_in_another_version_than_the_lock_pins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("traceproof.cli.verify.unlike_the_lock", lambda *_, **__: {"fla": "fla is another"})

    def snakemake(*_: object, **__: object) -> int:
        assert capsys.readouterr().err == "note: fla is another\n"
        return 7

    monkeypatch.setattr(run, "snakemake", snakemake)
    assert code_of(["verify", "--op-type", "gdn"]) == 7


def test_jobs_may_take_most_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "available_memory", lambda: 100 << 30)
    monkeypatch.setattr(programs, "nvidia_smi", lambda _: [["1000"]])
    assert programs.memory_for_jobs() == {"mem_mb": 85 << 10, "gpu_mb": 950}


def test_a_container_s_limit_counts_and_files_that_it_read_do_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(programs, "CGROUP", tmp_path)
    free = programs.available_memory()
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 1000\n")
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert abs(programs.available_memory() - free) < 1 << 30
    (tmp_path / "memory.max").write_text("10000\n")
    assert programs.available_memory() == 6000


DATASET = Path(__file__).resolve().parent / "dataset"


@pytest.fixture(scope="module")
def shipped() -> dict[str, Any]:
    value: dict[str, Any] = YAML(typ="safe").load((ROOT / "config.yaml").read_text())
    return value


def problems(raw: dict[str, Any], root: Path = ROOT) -> list[str]:
    with pytest.raises(TraceproofError) as caught:
        read_config(raw, root=root)
    assert str(caught.value).startswith("config.yaml cannot be used:\n  - ")
    return list(caught.value.problems)


def test_the_shipped_file_is_valid_and_names_every_key(shipped: dict[str, Any]) -> None:
    config = read_config(shipped, root=ROOT)
    assert config.test_sizes == ("small", "medium")
    assert config.solutions.demanded == DEMANDED
    assert set(shipped) == set(Config.model_fields)
    assert shipped["dataset"] == "locked"
    for key in ("selection", "limits", "stacks"):
        model = Config.model_fields[key].annotation
        assert set(getattr(model, "model_fields", ())) == set(shipped[key])


def test_every_key_of_the_shipped_file_has_a_comment() -> None:
    lines = (ROOT / "config.yaml").read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if line and not line.startswith((" ", "#")):
            assert above.startswith("#"), f"no comment above {line!r}"


def test_all_problems_are_reported_at_once(shipped: dict[str, Any]) -> None:
    raw = merged(
        shipped,
        {
            "foo": 1,
            "seed": "three",
            "test_sizes": ["small", "huge"],
            "models": "llama_3_1_8b",
            "solutions": True,
            "limits": {"wall_s": -1},
            "selection": {"optype": [], "op_type": ["gmm"]},
            "dataset": {"pypi": None, "path": str(DATASET)},
        },
    )
    found = "\n".join(problems(raw))
    for part in (
        "foo: unknown key",
        "seed: 'three': input should be a valid integer",
        "test_sizes.1: 'huge'",
        "models: 'llama_3_1_8b': input should be a valid list",
        "solutions: True: input should be a valid mapping",
        "limits.wall_s: -1",
        "selection.optype: unknown key; did you mean 'op_type'?",
    ):
        assert part in found


def test_what_fits_the_schema_is_checked_on_disk_whatever_else_is_wrong(shipped: dict[str, Any]) -> None:
    raw = merged(shipped, {"seed": -1, "known": "nowhere.yaml", "dataset": {"pypi": None, "path": "/nowhere"}})
    assert [problem.partition(":")[0] for problem in problems(raw)] == ["seed", "known", "dataset.path"]


def test_an_op_type_of_ones_own_is_fine_where_the_dataset_has_it(shipped: dict[str, Any], tmp_path: Path) -> None:
    by_content = json.dumps(rmsnorm("two", op_type="op_of_two"))  # the other op_type is a folder's name
    write_files(tmp_path / "definitions", {"my_op/one.json": "{}", "other/two.json": by_content})
    changes = {"dataset": {"pypi": None, "path": str(tmp_path)}, "selection": {"op_type": ["my_op", "op_of_two"]}}
    assert read_config(merged(shipped, changes), root=ROOT).selection.op_types == ("my_op", "op_of_two")
    [problem] = problems(merged(shipped, changes | {"selection": {"op_type": ["my_op", "op_of_too"]}}))
    assert "'op_of_too' is not an op_type; did you mean 'op_of_two'?" in problem


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ({}, "give exactly one of 'pypi', 'git' and 'path', not none"),
        ({"path": "a", "git": {"url": "u", "commit": "0" * 40}}, "not 'git' and 'path'"),
        ({"git": {"url": "u", "commit": "main"}}, "dataset.git.commit: 'main' does not have the form"),
        ({"git": {"url": "--upload-pack=x", "commit": "0" * 40}}, "dataset.git.url: is not a URL"),
        ({"pypi": {"package": "p", "version": "1"}}, "dataset.pypi.sha256: missing"),
        ({"path": "."}, "holds no definitions"),
    ],
)
def test_a_bad_dataset_source(shipped: dict[str, Any], dataset: dict[str, Any], said: str, tmp_path: Path) -> None:
    raw = {**copy.deepcopy(shipped), "dataset": dataset, "known": None}
    assert any(said in problem for problem in problems(raw, tmp_path))


def test_a_folder_alone_is_short_for_path_and_all_overrides_both_lists(shipped: dict[str, Any]) -> None:
    assert read_config({**shipped, "dataset": str(DATASET)}, root=ROOT).dataset.path == DATASET
    changes = {"selection": {"op_type": ["rmsnorm"], "definition_name": ["x"], "all": True}}
    selection = read_config(merged(shipped, changes), root=ROOT).selection
    assert (selection.op_types, selection.definitions) == ((), ())


def test_a_locked_dataset_is_what_sources_lock_pins(shipped: dict[str, Any], tmp_path: Path) -> None:
    raw = {**shipped, "known": None}
    (problem,) = problems(raw, tmp_path)
    assert problem.startswith(f"dataset: locked: {tmp_path / 'sources.lock'} has no flashinfer_trace")
    assert problem.endswith("pin it: traceproof clone-repos flashinfer_trace")
    pin: dict[str, Any] = {"url": "https://example.org/trace", "commit": "1" * 40, "ref": "refs/heads/main"}
    lock = tmp_path / "sources.lock"
    lock.write_text(json.dumps({"sources": {"flashinfer_trace": pin}}))
    git = read_config(raw, root=tmp_path).dataset.git
    assert git is not None
    assert (git.url, git.commit, git.folder) == (pin["url"], pin["commit"], ".")
    pin = {"package": "p", "version": "1", "sha256": "2" * 64, "folder": "trace"}
    lock.write_text(json.dumps({"sources": {"flashinfer_trace": pin}}))
    pypi = read_config(raw, root=tmp_path).dataset.pypi
    assert pypi is not None
    assert pypi.model_dump() == pin


TEXT = '{"solution": "mine", "verdict": "accepted"}'


def key_files(folder: Path, name: str) -> tuple[Path, Path]:
    """A new key in PEM: private, public."""
    key = Ed25519PrivateKey.generate()
    pem = serialization.Encoding.PEM
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    none = serialization.NoEncryption()
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def code(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as leaving:
        main(["check-certificate", *arguments])
    return leaving.value.code


def test_every_byte_counts_and_the_key(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(TEXT, encoding="utf-8")
    mine, public = key_files(tmp_path, "mine")
    _, other = key_files(tmp_path, "other")
    with pytest.raises(TraceproofError, match="has no signature"):
        check(file, None)
    place = sign(file, private_key(mine))
    assert check(file, None) == check(file, public)
    assert code(str(file), "--key", str(public)) == 0
    with pytest.raises(TraceproofError, match="another key"):
        check(file, other)
    assert code(str(file), "--key", str(other)) == 2
    for at in range(len(TEXT)):
        changed = bytearray(TEXT.encode())
        changed[at] ^= 1
        file.write_bytes(changed)
        with pytest.raises(TraceproofError, match="not what was signed"):
            check(file, None)
    file.write_text(TEXT, encoding="utf-8")
    signed = place.read_bytes()
    for at in range(len(signed)):
        place.write_bytes(signed[:at] + bytes([signed[at] ^ 1]) + signed[at + 1 :])
        try:
            check(file, public)
        except TraceproofError:
            continue
        assert chr(signed[at]).isspace(), at


def test_what_is_no_key_is_told(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("no key", encoding="utf-8")
    for name in ("key.pem", "absent.pem"):
        with pytest.raises(TraceproofError, match="is no private key"):
            private_key(tmp_path / name)

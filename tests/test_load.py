"""What a job takes of the machine, and which jobs start first."""

from __future__ import annotations

from pathlib import Path

from traceproof.ops.cases import Case
from traceproof.pipeline.load import BASE_MB, GPU_MB, KERNEL_COPIES, LANE_MB, SLACK, Load
from traceproof.pipeline.plan_facts import DRAWING_LANES, HOST_COPIES, LANES
from traceproof.pipeline.records import OpTypePlan, PlannedCase, PlannedDefinition

OP_TYPE = "gemm"
DEFINITIONS = 12
GIB = 1 << 30
TENSORS_MB = 2  # of a case


def entry(name: str, *, large: bool, memory: int, trials: int, **far: int) -> PlannedDefinition:
    case = PlannedCase(
        case=Case("small-0", "small", {"M": 1 << 18}, 0, {}),
        digest="0" * 32,
        memory=memory,
        oracle_bytes=memory,
        trials=trials,
        skip=None,
        large=large,
        nonce=0,
    ).model_copy(update=far)
    tensor = {"shape": ["M"], "dtype": "float32"}
    definition = {
        "name": name,
        "op_type": OP_TYPE,
        "axes": {"M": {"type": "var"}},
        "inputs": {"A": tensor},
        "outputs": {"C": tensor},
        "reference": "def run(A): ...",
    }
    return PlannedDefinition(
        path=f"{name}.json", digest="0" * 32, no_oracle=None, nonce=0, definition=definition, cases=(case,)
    )


def load(
    folder: Path, *, large: bool, gpu: bool = True, memory: int = 1 << 20, trials: int = 0, **far: int
) -> Load:
    entries = {
        name: entry(name, large=large, memory=memory, trials=trials, **far)
        for name in map("gemm_n{}".format, range(DEFINITIONS))
    }
    plan = OpTypePlan(op_type=OP_TYPE, dataset="", definitions=entries, broken=())
    (folder / f"{OP_TYPE}.json").write_text(plan.as_text())
    return Load(folder, side_by_side=gpu)


def test_pytorchs_forms_lease_what_is_between_their_operations(tmp_path: Path) -> None:
    found = load(tmp_path, large=False, kernel_bytes=GIB, eager_bytes=3 * GIB)
    kernel, eager = (found.gpu_mb(OP_TYPE, actor) for actor in ("sglang", "torch"))
    assert eager - kernel == SLACK * 2048
    assert found.gpu_mb(OP_TYPE, "sglang_native") == eager


def test_actors_of_large_cases_start_before_others(tmp_path: Path) -> None:
    late = load(tmp_path, large=False).priority(OP_TYPE, "torch")
    assert load(tmp_path, large=True).priority(OP_TYPE, "torch") > late


def test_definitions_are_judged_side_by_side_where_there_is_a_gpu(tmp_path: Path) -> None:
    assert load(tmp_path, large=True).judge_lanes(OP_TYPE) == LANES


def test_without_a_gpu_one_definition_is_judged_at_a_time(tmp_path: Path) -> None:
    assert load(tmp_path, large=True, gpu=False).judge_lanes(OP_TYPE) == 1


def test_samplers_references_run_more_side_by_side_than_others(tmp_path: Path) -> None:
    lanes = [load(tmp_path, large=True, trials=trials).lanes(OP_TYPE, "reference") for trials in (0, 500)]
    assert lanes == [LANES, DRAWING_LANES]


def test_before_anything_is_planned_a_job_has_one_lane(tmp_path: Path) -> None:
    empty = Load(tmp_path, side_by_side=True)
    assert (empty.judge_lanes(OP_TYPE), empty.lanes(OP_TYPE, "reference")) == (1, 1)


def test_of_jobs_alike_the_one_with_more_to_do_starts_first(tmp_path: Path) -> None:
    found = [load(tmp_path, large=True, memory=memory).priority(OP_TYPE, "torch") for memory in (GIB, 2 * GIB)]
    assert found == sorted(set(found))
    assert max(found) < load(tmp_path, large=True).priority(OP_TYPE, "reference")


def test_of_references_alike_the_one_with_more_draws_starts_first(tmp_path: Path) -> None:
    draws = (0, 500)
    of_references = [load(tmp_path, large=True, trials=trials).priority(OP_TYPE, "reference") for trials in draws]
    assert of_references == sorted(set(of_references))
    assert len({load(tmp_path, large=True, trials=trials).priority(OP_TYPE, "torch") for trials in draws}) == 1


def test_a_kernel_takes_less_of_a_gpu_than_a_reference_and_an_oracle_of_the_judge_nothing(tmp_path: Path) -> None:
    found = load(tmp_path, large=True, memory=8 * GIB)
    kernel, reference, oracle = (found.gpu_mb(OP_TYPE, actor) for actor in ("torch", "reference", "oracle"))
    alone = GPU_MB + LANE_MB
    assert oracle == alone
    assert alone < kernel < alone + 2 * KERNEL_COPIES * TENSORS_MB
    assert reference > LANES * 8 * 1024
    assert load(tmp_path, large=False, memory=8 * GIB).gpu_mb(OP_TYPE, "oracle") > 8 * 1024


def test_what_a_gpu_computes_takes_little_of_the_host(tmp_path: Path) -> None:
    on_cpu = load(tmp_path, large=False, gpu=False, memory=8 * GIB).actor_mb(OP_TYPE, "torch")
    found = load(tmp_path, large=False, memory=8 * GIB)
    kernel, reference, oracle = (found.actor_mb(OP_TYPE, actor) for actor in ("torch", "reference", "oracle"))
    assert on_cpu > 8 * 1024
    assert kernel < BASE_MB + LANE_MB + 2 * HOST_COPIES * TENSORS_MB
    assert reference - kernel > (LANES - 1) * LANE_MB
    assert oracle > BASE_MB + 512  # cases of up to so much are computed by a CPU

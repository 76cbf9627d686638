def judge_code(wildcards):
    """Digest of the code that the verdicts depend on."""
    return FLOW.judge_code(wildcards.op_type)


def judge_manifests(wildcards):
    """What every actor of the op_type left."""
    return FLOW.manifests(wildcards.op_type)


def judge_lanes(wildcards):
    """How many definitions are judged side by side."""
    return FLOW.load.judge_lanes(wildcards.op_type)


def judge_gpu(wildcards):
    """GPUs that a batch system is asked for, if there are large cases."""
    return FLOW.gpus(wildcards.op_type)


def judge_gpu_model(wildcards):
    """The model of GPU that a batch system is asked for, if there are large cases."""
    return FLOW.gpu_model if judge_gpu(wildcards) else None


def judge_memory(wildcards, attempt):
    """Memory of the job: as planned, and more where a batch system ended it and it is tried again."""
    return attempt * FLOW.load.judge_mb(wildcards.op_type)


rule judge:
    """Judge every actor's outputs of one op_type by the oracle's."""
    input:
        cases=f"{FLOW.run}/cases/{{op_type}}.json",
        manifests=judge_manifests,
    output:
        f"{FLOW.run}/verdicts/{{op_type}}.jsonl",
    log:
        f"{FLOW.run}/logs/judge/{{op_type}}.log",
    priority: 800  # what can be judged is, while other op_types still run
    threads: judge_lanes
    resources:
        mem_mb=judge_memory,
        gpu=judge_gpu,
        gpu_model=judge_gpu_model,
    params:
        python=FLOW.python(MAIN),
        code=judge_code,
        tolerance=FLOW.tolerance,
        repeat=FLOW.repeat,
        record=FLOW.sources.record(MAIN, ""),
        caches=FLOW.caches,
        store=f"{FLOW.results}/store",
    shell:
        "PYTHONPATH=src {params.python:q} -P -m traceproof.pipeline.job_client scripts/judge.py --cases {input.cases:q} --manifests {input.manifests:q}"
        " --stack {params.record:q} --caches {params.caches:q} --verdicts {output:q} --store {params.store:q}"
        " --code {params.code:q} --tolerance {params.tolerance:q} --repeat={params.repeat:q} --threads {threads:q}"
        " --memory-mb {resources.mem_mb:q} --log {log:q}"

def actor_stack(wildcards):
    """Stack record the job depends on."""
    return FLOW.sources.recorded(FLOW.actor_stack(wildcards.actor))


def actor_record(wildcards):
    """The record of the actor's stack, as far as the op_type depends on it."""
    return FLOW.sources.record(FLOW.actor_stack(wildcards.actor), wildcards.op_type)


def actor_python(wildcards):
    """The interpreter that an actor runs in."""
    return FLOW.python(FLOW.actor_stack(wildcards.actor))


def actor_path(wildcards):
    """PYTHONPATH of the actor."""
    return FLOW.sources.path(FLOW.actor_stack(wildcards.actor))


def actor_code(wildcards):
    """Digest of all code of the job: an edit of one op reruns that op_type alone."""
    return FLOW.actor_code(wildcards.op_type, wildcards.actor)


def outputs_code(wildcards):
    """Digest of the code that the outputs are keyed by."""
    return FLOW.outputs_code(wildcards.op_type, wildcards.actor)


def actor_builds(wildcards):
    """JIT build results the actor depends on, if its stack builds any."""
    return FLOW.builds(wildcards.op_type, wildcards.actor)


def actor_lanes(wildcards):
    """How many definitions run side by side."""
    return FLOW.load.lanes(wildcards.op_type, wildcards.actor)


def actor_threads(wildcards):
    """Cores of the job: definitions side by side wait for the GPU; an allocation is for itself, and of two, one works."""
    return (actor_lanes(wildcards) + 1) // 2 if workflow.nodes else 1


def actor_memory(wildcards, attempt):
    """Memory of the job: as planned, and more where a batch system ended it and it is tried again."""
    return attempt * FLOW.load.actor_mb(wildcards.op_type, wildcards.actor)


def actor_gpu(wildcards):
    """GPUs that a batch system is asked for, if the job opens one."""
    return FLOW.gpus(wildcards.op_type, wildcards.actor)


def actor_gpu_model(wildcards):
    """The model of GPU that a batch system is asked for, if the job opens one."""
    return FLOW.gpu_model if actor_gpu(wildcards) else None


def actor_group(wildcards):
    """Jobs that a batch system runs in one allocation: interpreters start, and packages are imported, once for all."""
    number = FLOW.load.allocation(wildcards.op_type, wildcards.actor)
    name = f"{wildcards.actor}{wildcards.shard}-{number}"
    # What all of them are called in a profile's `group-components`.
    workflow.parent_groupids[name] = "actors"
    return name


def actor_priority(wildcards):
    """Jobs that decide when a run is done start first."""
    return FLOW.load.priority(wildcards.op_type, wildcards.actor)


def actor_shown(wildcards):
    """What `force: true` changes in a dry run: a run drops the outputs, and a dry one shows what would follow."""
    return FLOW.config.force and workflow.dryrun


rule actor:
    """Run one actor over one op_type's cases, or a shard of them; what the store holds already is not run again."""
    input:
        cases=f"{FLOW.run}/cases/{{op_type}}.json",
        stack=actor_stack,
        built=actor_builds,
    output:
        f"{FLOW.run}/actors/{{op_type}}/{{actor}}{{shard}}.json",
    log:
        f"{FLOW.run}/logs/actors/{{op_type}}-{{actor}}{{shard}}.log",
    priority: actor_priority
    group:
        actor_group
    threads: actor_threads
    resources:
        mem_mb=actor_memory,
        lanes=actor_lanes,
        gpu=actor_gpu,
        gpu_model=actor_gpu_model,
    params:
        python=actor_python,
        record=actor_record,
        path=actor_path,
        code=actor_code,
        outputs_code=outputs_code,
        limits=FLOW.limits,
        store=f"{FLOW.results}/store",
        caches=FLOW.caches,
        shown=actor_shown,
        weak=FLOW.weak_flag,
    shell:
        "PYTHONPATH={params.path:q} {params.python:q} -P -m traceproof.pipeline.job_client scripts/actor.py --actor {wildcards.actor:q}"
        " --shard={wildcards.shard:q} --cases {input.cases:q} --stack {params.record:q} --manifest {output:q} --built {input.built:q}"
        " --caches {params.caches:q} --store {params.store:q} --code {params.outputs_code:q}"
        " --limits {params.limits:q} --lanes {resources.lanes:q}"
        " {params.weak:q} {FLOW.force_flag:q} --log {log:q}"

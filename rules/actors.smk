def actor_stack(wildcards):
    """The record of the stack that an actor runs in."""
    return f"{FLOW.results}/stacks/{FLOW.actor_stack(wildcards.actor)}.json"


def actor_python(wildcards):
    """The interpreter that an actor runs in."""
    return FLOW.python(FLOW.actor_stack(wildcards.actor))


def actor_code(wildcards):
    """Digest of all code of the job: an edit of one op reruns that op_type alone."""
    return FLOW.actor_code(wildcards.op_type, wildcards.actor)


def outputs_code(wildcards):
    """Digest of the code that the outputs are keyed by."""
    return FLOW.outputs_code(wildcards.op_type, wildcards.actor)


def actor_builds(wildcards):
    """What came of the kernel modules that the actor needs, if its stack builds any."""
    return FLOW.builds(wildcards.op_type, wildcards.actor)


rule actor:
    """Run one actor over one op_type's cases; what the store holds already is not run again."""
    input:
        cases=f"{FLOW.run}/cases/{{op_type}}.json",
        stack=actor_stack,
        forced=FLOW.forced,
        built=actor_builds,
    output:
        f"{FLOW.run}/actors/{{op_type}}/{{actor}}.json",
    log:
        f"{FLOW.run}/logs/actors/{{op_type}}-{{actor}}.log",
    threads: 1
    resources:
        mem_mb=job_memory,
    params:
        python=actor_python,
        code=actor_code,
        outputs_code=outputs_code,
        limits=FLOW.limits,
        store=f"{FLOW.results}/store",
        caches=FLOW.caches,
    shell:
        "PYTHONPATH=src {params.python:q} scripts/actor.py --actor {wildcards.actor} --cases {input.cases}"
        " --stack {input.stack} --manifest {output} --built {input.built}"
        " --caches {params.caches:q} --store {params.store} --code {params.outputs_code}"
        " --limits {params.limits:q} --threads {threads} {FLOW.force_flag} --log {log}"

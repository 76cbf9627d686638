from traceproof.ops import registry


def actor_stack(wildcards):
    """What says what the actor's stack is."""
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
    """What came of the kernel modules that the actor needs, if its stack builds any."""
    return FLOW.builds(wildcards.op_type, wildcards.actor)


def actor_lanes(wildcards):
    """How many definitions run side by side."""
    return FLOW.load.lanes(wildcards.op_type, wildcards.actor)


def actor_threads(wildcards):
    """Cores of the job: of two definitions side by side, one waits for the GPU."""
    return (actor_lanes(wildcards) + 1) // 2


def actor_memory(wildcards):
    """Memory of the job, as planned."""
    return FLOW.load.actor_mb(wildcards.op_type, wildcards.actor)


def actor_forced(wildcards):
    """What `force: true` changes, but not in a dry run: later runs would do what it only showed."""
    return FLOW.forced(dry=workflow.dryrun)


def actor_shown(wildcards):
    """What `force: true` changes in a dry run instead."""
    return FLOW.config.force and workflow.dryrun


rule actor:
    """Run one actor over one op_type's cases; what the store holds already is not run again."""
    input:
        cases=f"{FLOW.run}/cases/{{op_type}}.json",
        stack=actor_stack,
        forced=actor_forced,
        built=actor_builds,
    output:
        f"{FLOW.run}/actors/{{op_type}}/{{actor}}.json",
    log:
        f"{FLOW.run}/logs/actors/{{op_type}}-{{actor}}.log",
    wildcard_constraints:
        actor="|".join({*FLOW.actors} - {"reference", "oracle", *FLOW.slow_imports})
        or "none",
    threads: actor_threads
    resources:
        mem_mb=actor_memory,
        lanes=actor_lanes,
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
        "PYTHONPATH={params.path:q} {params.python:q} scripts/actor.py --actor {wildcards.actor:q}"
        " --cases {input.cases:q} --stack {params.record:q} --manifest {output:q} --built {input.built:q}"
        " --caches {params.caches:q} --store {params.store:q} --code {params.outputs_code:q}"
        " --limits {params.limits:q} --lanes {resources.lanes:q} --memory-mb {resources.mem_mb:q}"
        " {params.weak:q} {FLOW.force_flag:q} --log {log:q}"


# These jobs decide when a run is done, so they start first: SGLang and FLA take long to import, FlashInfer compiles
# something for most cases of some op_types, and references run one small kernel after the other from Python. Oracles
# keep cores busy while those wait for a GPU.
use rule actor as actor_import_first with:
    wildcard_constraints:
        actor="|".join(FLOW.slow_imports) or "none",
    priority: 6


use rule actor as actor_own_first with:
    wildcard_constraints:
        actor="reference|oracle",
    priority: 5


use rule actor as actor_long_first with:
    wildcard_constraints:
        actor="reference",
        op_type="|".join(
            name for name in registry.known() if registry.record(name).long
        ),
    priority: 7


use rule actor as actor_compile_first with:
    wildcard_constraints:
        actor="|".join(FLOW.compiling) or "none",
        op_type="|".join(
            name for name in registry.known() if registry.record(name).compiles_late
        ),
    priority: 7


ruleorder: actor_long_first > actor_own_first
ruleorder: actor_compile_first > actor

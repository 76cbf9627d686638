# Runs of other selections may be under way and read what all of them share: `update` leaves it where it is until it is
# written anew, in one rename, and entry.run lets one run make it while the others wait.
rule environment:
    """Build .venvs/<environment> from its pins in envs/."""
    input:
        "envs/{environment}.txt",
    output:
        ".venvs/{environment}/installed.json",
    log:
        f"{FLOW.results}/logs/environment-{{environment}}.log",
    message:
        "building .venvs/{wildcards.environment} from its pins (once, 1 to 5 minutes)"
    shell:
        "{DRIVER:q} scripts/environment.py --environment {wildcards.environment:q} --stamp {output:q} --log {log:q}"


def stack_environment(wildcards):
    """The environment that a stack runs in, if it is one of ours."""
    return FLOW.environment(wildcards.stack)


def stack_python(wildcards):
    """The interpreter that a stack runs in."""
    return FLOW.python(wildcards.stack)


def stack_clones(wildcards):
    """What came of cloning the stack's source, if it is taken from sources.lock."""
    return FLOW.sources.clones(wildcards.stack)


def stack_source(wildcards):
    """Where the stack's package is taken from instead of its environment."""
    return FLOW.sources.of(wildcards.stack)


def stack_linked(wildcards):
    """Where a checkout's package is imported from."""
    return FLOW.sources.linked(wildcards.stack)


def stack_cuda_home(wildcards):
    """The CUDA toolkit of this machine that the stack compiles with, if one is configured."""
    return FLOW.stacks[wildcards.stack].cuda_home


def stack_source_state(wildcards):
    """What that source is now."""
    return FLOW.sources.state(wildcards.stack)


def stack_code(wildcards):
    """Digest of the code that decides the stack's records."""
    return FLOW.sources.code(wildcards.stack)


rule sources:
    """Bring the sources that stacks take from sources.lock to sources/, each as it is pinned there."""
    output:
        update(FLOW.sources.cloned),
    log:
        f"{FLOW.results}/logs/sources.log",
    params:
        pins=FLOW.sources.pins,
    shell:
        "{DRIVER:q} scripts/sources.py --pins {params.pins:q} --out {output:q} --log {log:q}"


rule stack:
    """Record what a stack is: versions and device."""
    input:
        environment=stack_environment,
        cloned=stack_clones,
    output:
        update(f"{FLOW.results}/stacks/{{stack}}.json"),
    log:
        f"{FLOW.results}/logs/stack-{{stack}}.log",
    priority: 2000  # builds wait for it, and a first run waits for builds
    resources:
        gpu=FLOW.one_gpu,
        gpu_model=FLOW.gpu_model,
    params:
        python=stack_python,
        source=stack_source,
        state=stack_source_state,
        linked=stack_linked,
        cuda_home=stack_cuda_home,
    shell:
        "{DRIVER:q} scripts/stack.py --stack {wildcards.stack:q} --python {params.python:q} --source={params.source:q}"
        " --state={params.state:q} --linked {params.linked:q} --cuda-home={params.cuda_home:q}"
        " --out {output:q} --log {log:q}"


rule dependencies:
    """Digest what each op_type's ground truths can run of a stack's package: outputs are keyed by it.

    A record an op_type goes beside the output; what it leaves the same is found in the store.
    """
    input:
        f"{FLOW.results}/stacks/{{stack}}.json",
    output:
        update(f"{FLOW.results}/stacks/{{stack}}/dependencies.json"),
    log:
        f"{FLOW.results}/logs/dependencies-{{stack}}.log",
    priority: 1900  # ground truths wait for it, and some of them compile for minutes in a first run
    params:
        python=stack_python,
        source=stack_source,
        state=stack_source_state,
        code=stack_code,
    shell:
        "{DRIVER:q} scripts/dependencies.py --stack {wildcards.stack:q} --record {input:q} --python {params.python:q}"
        " --source={params.source:q} --out {output:q} --log {log:q}"

rule environment:
    """Build .venvs/<environment> from its pins in envs/."""
    input:
        "envs/{environment}.txt",
    output:
        ".venvs/{environment}/installed.json",
    log:
        f"{FLOW.results}/logs/environment-{{environment}}.log",
    message:
        "building .venvs/{wildcards.environment}, which may take minutes"
    shell:
        "{DRIVER} scripts/environment.py --environment {wildcards.environment} --stamp {output} --log {log}"


def stack_environment(wildcards):
    """The environment that a stack runs in, if it is one of ours."""
    return FLOW.environment(wildcards.stack)


def stack_python(wildcards):
    """The interpreter that a stack runs in."""
    return FLOW.python(wildcards.stack)


rule stack:
    """Record what a stack is: versions, device, and the digest that keys its outputs."""
    input:
        stack_environment,
    output:
        f"{FLOW.results}/stacks/{{stack}}.json",
    log:
        f"{FLOW.results}/logs/stack-{{stack}}.log",
    params:
        python=stack_python,
    shell:
        "{DRIVER} scripts/stack.py --stack {wildcards.stack} --python {params.python:q} --out {output} --log {log}"

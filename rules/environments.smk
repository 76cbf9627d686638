rule environment:
    """Build .venvs/<environment> from its pins in envs/."""
    input:
        "envs/{environment}.txt",
    output:
        ".venvs/{environment}/installed.json",
    log:
        f"{FLOW.results}/logs/environment-{{environment}}.log",
    localrule: True
    message:
        "building .venvs/{wildcards.environment} from its pins (once, 1 to 5 minutes)"
    shell:
        "python scripts/environment.py --environment {wildcards.environment:q} --stamp {output:q} --log {log:q}"


rule stack:
    """Record what a stack is: versions, device, and what its packages hold."""
    input:
        environment=FLOW.stack_environment,
        cloned=FLOW.stack_clones,
    output:
        f"{FLOW.results}/stacks/{{stack}}.json",
    log:
        f"{FLOW.results}/logs/stack-{{stack}}.log",
    priority: 2000  # everything of the stack waits for it
    resources:
        gpu=FLOW.one_gpu,
        gpu_model=FLOW.gpu_model,
    params:
        stack=FLOW.stack_options,
        state=FLOW.stack_state,
    shell:
        "python scripts/stack.py --stack {wildcards.stack:q} {params.stack:q} --out {output:q} --log {log:q}"

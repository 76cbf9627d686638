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
        "python scripts/job.py environment --name {wildcards.environment:q} --stamp {output:q} --log {log:q}"


rule stack:
    """Record what a stack is: versions, device, and what its packages hold."""
    input:
        environment=by_stack(FLOW.environment),
        cloned=by_stack(FLOW.sources.clones),
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
        state=by_stack(FLOW.sources.state),
    shell:
        "python scripts/job.py stack --name {wildcards.stack:q} {params.stack:q} --out {output:q} --log {log:q}"

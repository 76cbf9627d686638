def verdict_files(wildcards):
    """Verdicts of every op_type that was planned, or of one family's; known once planning is done."""
    checkpoints.cases.get()
    op_types = FLOW.op_types(family=wildcards.get("family", ""))
    return expand(f"{FLOW.run}/verdicts/{{op_type}}.jsonl", op_type=op_types)


def report_stacks(wildcards):
    """Records of the stacks that anything ran in; known once planning is done."""
    checkpoints.cases.get()
    stacks = FLOW.stacks_of(FLOW.op_types(family=wildcards.get("family", "")))
    return expand(f"{FLOW.results}/stacks/{{stack}}.json", stack=stacks)


def report_builders(wildcards):
    """Records of the stacks that build kernels: asked for at once, so that builds start as soon as all is planned."""
    return FLOW.builders(family=wildcards.get("family", ""))


rule report:
    """Put all verdicts in one summary, and keep them for later comparison."""
    input:
        verdicts=verdict_files,
        known=FLOW.known,
        stacks=report_stacks,
        builders=report_builders,
        lock=FLOW.lock,
    output:
        f"{FLOW.run}/summary.json",
    log:
        f"{FLOW.run}/logs/report.log",
    params:
        code=code_digest("traceproof.pipeline.stages.report"),
        history=FLOW.history,
        scope=FLOW.scope,
        known=FLOW.known_state,
        store=f"{FLOW.results}/store",
    shell:
        "{DRIVER:q} scripts/report.py --verdicts {input.verdicts:q} --known {input.known:q} --stacks {input.stacks:q}"
        " --lock {input.lock:q} --history {params.history:q} --scope {params.scope:q} --store {params.store:q} --code {params.code:q} --summary {output:q} --log {log:q}"


use rule report as report_family with:
    output:
        f"{FLOW.run}/summaries/{{family}}.json",
    log:
        f"{FLOW.run}/logs/report-{{family}}.log",


for family in families():

    rule:
        name:
            f"verify_{family}"
        input:
            f"{FLOW.run}/summaries/{family}.json",
        log:
            f"{FLOW.run}/logs/verify_{family}.log",
        localrule: True
        params:
            run=FLOW.run,
            family=family,
        shell:
            "{DRIVER:q} scripts/outcome.py --summary {input:q} --run {params.run:q} --family {params.family:q}"
            " --log {log:q}"

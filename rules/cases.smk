def slots(wildcards):
    """How many jobs run at once: those that a batch system is given, or the cores of this machine."""
    return workflow.nodes or workflow.cores


checkpoint cases:
    """Decide what will be run, one file per op_type. A checkpoint: an op_type whose file stays the same reruns nothing."""
    input:
        fetched=FLOW.fetched,
        stack=f"{FLOW.results}/stacks/torch.json",
    output:
        directory(f"{FLOW.run}/cases"),
    log:
        f"{FLOW.run}/logs/cases.log",
    resources:
        slots=slots,  # no param: with other cores, a finished plan stays
    params:
        dataset=FLOW.dataset,
        state=FLOW.dataset_state,
        selection=FLOW.selection,
        code=FLOW.cases_code,
        python=FLOW.python(MAIN),
        store=f"{FLOW.results}/store",
        caches=FLOW.caches,
        store_gb=FLOW.store_gb,
        actors=len(FLOW.actors) - 1,
        weak=FLOW.weak_flag,
    shell:
        "PYTHONPATH=src {params.python:q} -P -m traceproof.pipeline.job_client scripts/cases.py --dataset {params.dataset:q} --stack {input.stack:q}"
        " --caches {params.caches:q} --selection {params.selection:q} --store {params.store:q} --store-gb {params.store_gb:q}"
        " --code {params.code:q} --actors {params.actors:q} --slots {resources.slots:q} {params.weak:q} --out {output:q} --log {log:q}"

checkpoint cases:
    """Decide what will be run, one file per op_type. A checkpoint: an op_type whose file stays the same reruns nothing."""
    input:
        fetched=FLOW.fetched,
        stack=f"{FLOW.results}/stacks/torch.json",
    output:
        directory(f"{FLOW.run}/cases"),
    log:
        f"{FLOW.run}/logs/cases.log",
    params:
        dataset=FLOW.dataset,
        state=FLOW.dataset_state,
        selection=FLOW.selection,
        code=FLOW.cases_code,
        python=FLOW.python(MAIN),
        store=f"{FLOW.results}/store",
        store_gb=FLOW.store_gb,
        actors=len(FLOW.actors) - 1,
        weak=FLOW.weak_flag,
    shell:
        "PYTHONPATH=src {params.python:q} scripts/cases.py --dataset {params.dataset:q} --stack {input.stack:q}"
        " --selection {params.selection:q} --store {params.store:q} --store-gb {params.store_gb:q}"
        " --actors {params.actors:q} {params.weak:q} --out {output:q} --log {log:q}"

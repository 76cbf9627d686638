rule extract:
    """Read the configured models; what they need and the dataset lacks stands beside a copy of it."""
    input:
        fetched=FLOW.source_fetched,
        configs=FLOW.model_files,
        reader=FLOW.environment(READER),
        main=FLOW.environment(MAIN),
    output:
        update(f"{FLOW.results}/extract/dataset/.fetched.json"),
    log:
        f"{FLOW.results}/logs/extract.log",
    threads: 1
    resources:
        mem_mb=2000,
    params:
        models=FLOW.models,
        dataset=FLOW.source,
        state=FLOW.source_state,
        code=FLOW.extract_code,
        extract_python=FLOW.python(READER),
        torch_python=FLOW.python(MAIN),
        out=f"{FLOW.results}/extract/dataset",
        report=f"{FLOW.results}/extract",
    shell:
        "{DRIVER:q} scripts/extract.py --models {params.models:q} --dataset {params.dataset:q} --out {params.out:q}"
        " --report {params.report:q} --extract-python {params.extract_python:q}"
        " --torch-python {params.torch_python:q} --log {log:q}"

rule solutions:
    """Judge the solutions that the dataset holds for the selected definitions; not a part of `verify_all`."""
    input:
        fetched=FLOW.fetched,
        stack=FLOW.environment(MAIN),
    output:
        f"{FLOW.run}/solutions.json",
    log:
        f"{FLOW.run}/logs/solutions.log",
    resources:
        gpu=FLOW.one_gpu,
        gpu_model=FLOW.gpu_model,
    params:
        config=FLOW.config.model_dump_json(),
        dataset=FLOW.dataset,
        state=FLOW.dataset_state,
        hidden_seed=FLOW.hidden_seed,
        judged=f"{FLOW.results}/judged",
    shell:
        "{DRIVER:q} scripts/solutions.py --config {params.config:q} --dataset {params.dataset:q} --judged {params.judged:q}"
        " --hidden-seed {params.hidden_seed:q} --out {output:q} --log {log:q}"

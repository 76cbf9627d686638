rule history:
    """Replay known bugs of released packages: the release with the bug and the one without; not a part of `verify_all`."""
    input:
        fetched=FLOW.fetched,
        stack=FLOW.environment(MAIN),
    output:
        f"{FLOW.results}/replays/replay.json",
    log:
        f"{FLOW.results}/logs/history.log",
    threads: 64  # or as many as `--cores` says, if that is less
    params:
        config=FLOW.config.model_dump_json(),
        dataset=[FLOW.dataset],
    shell:
        "python scripts/history.py --config {params.config:q} --dataset {params.dataset:q} --jobs {threads:q}"
        " --out {output:q} --log {log:q}"

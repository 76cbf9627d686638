rule publish:
    """Write what a pull request for each verified definition would hold; `traceproof publish --push` sends it."""
    input:
        verdicts=planned(FLOW.verdicts),
        stack=FLOW.record(MAIN),
        generated=rules.tests.output,
        tests=f"{FLOW.run}/tests.json",
        lock=FLOW.lock,
    output:
        f"{FLOW.run}/publish/dry-run.json",
    log:
        f"{FLOW.run}/logs/publish.log",
    localrule: True
    params:
        options=[f"--dataset={FLOW.dataset}", f"--base={FLOW.source}", f"--origin={FLOW.dataset_source}"],
        run=[f"--run={FLOW.run}", f"--python={FLOW.python(MAIN)}"],
        code=code_digest("publish", "run"),
    shell:
        "python scripts/job.py publish {params.options:q} {params.run:q} --out {output:q} --log {log:q}"


rule chain:
    """The whole way: clone, extract, generate tests, run them, verify, and show what a push would publish."""
    input:
        planned(TESTS.rows),
        sources="sources/repos_config.json",
        tests=f"{FLOW.run}/tests.json",
        summary=f"{FLOW.run}/summary.json",
        dry_run=f"{FLOW.run}/publish/dry-run.json",
    log:
        f"{FLOW.run}/logs/chain.log",
    localrule: True
    params:
        selection=FLOW.config.run,
    shell:
        "python scripts/job.py conclude --sources {input.sources:q} --tests {input.tests:q} --summary {input.summary:q}"
        " --dry-run {input.dry_run:q} --selection={params.selection:q} --log {log:q}"

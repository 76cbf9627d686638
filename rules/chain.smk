rule chain:
    """The whole way: clone, extract, generate tests, run them, verify, and show what a push would publish."""
    input:
        sources="sources/repos_config.json",
        tests=f"{FLOW.run}/tests.json",
        summary=f"{FLOW.run}/summary.json",
        bundles=f"{FLOW.run}/publish/dry-run.json",
    log:
        f"{FLOW.run}/logs/chain.log",
    localrule: True
    params:
        run=FLOW.run,
        selection=FLOW.config.run,
    shell:
        "{DRIVER:q} scripts/chain.py --sources {input.sources:q} --tests {input.tests:q} --summary {input.summary:q}"
        " --run {params.run:q}"
        " --bundles {input.bundles:q} --selection={params.selection:q} --log {log:q}"

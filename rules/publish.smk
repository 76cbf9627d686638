rule publish:
    """Write what a pull request for each verified definition would hold; `traceproof publish --push` sends it."""
    input:
        verdicts=verdicts,
        stack=FLOW.record(MAIN),
        support=rules.test_support.output,
        generated=generated_tests,
        tests=f"{FLOW.run}/tests.json",
    output:
        f"{FLOW.run}/publish/dry-run.json",
    log:
        f"{FLOW.run}/logs/publish.log",
    localrule: True
    params:
        options=FLOW.publish_options,
        code=FLOW.publish_code,
    shell:
        "python scripts/publish.py {params.options:q} --list {output:q} --log {log:q}"


rule chain:
    """The whole way: clone, extract, generate tests, run them, verify, and show what a push would publish."""
    input:
        tested,
        sources="sources/repos_config.json",
        tests=f"{FLOW.run}/tests.json",
        summary=f"{FLOW.run}/summary.json",
        bundles=f"{FLOW.run}/publish/dry-run.json",
    log:
        f"{FLOW.run}/logs/chain.log",
    localrule: True
    params:
        selection=FLOW.config.run,
    shell:
        "python scripts/outcome.py --sources {input.sources:q} --tests {input.tests:q} --summary {input.summary:q}"
        " --bundles {input.bundles:q} --selection={params.selection:q} --log {log:q}"

from traceproof.codedigest import code_digest


rule publish:
    """Write what a pull request for each verified definition would hold; `traceproof publish --push` sends it."""
    input:
        verdicts=verdict_files,
        stack=FLOW.environment(MAIN),
        support=rules.test_support.output,
        generated=generated_files,
        tests=f"{FLOW.run}/tests.json",
    output:
        f"{FLOW.run}/publish/dry-run.json",
    log:
        f"{FLOW.run}/logs/publish.log",
    params:
        code=code_digest("traceproof.publish.prepare", "traceproof.publish.parts"),
        python=FLOW.python(MAIN),
        dataset=FLOW.dataset,
        base=FLOW.source,
        origin=FLOW.dataset_source,
        store=f"{FLOW.results}/store",
        run=FLOW.run,
    shell:
        "{DRIVER:q} scripts/publish.py --dataset {params.dataset:q} --base {params.base:q} --origin {params.origin:q}"
        " --run {params.run:q} --store {params.store:q} --python {params.python:q} --list {output:q} --log {log:q}"

# Verifies a dataset of kernel definitions: `snakemake --cores 4 verify_all`, or simply scripts/verify_all.py.
try:
    import snakemake_logger_plugin_traceproof as output
    from traceproof import programs
    from traceproof.digests import code_digest
    from traceproof.ops.registry import families
    from traceproof.run.flow import Pipeline, by_stack
    from traceproof.stacks import MAIN, READER
    from traceproof.testgen.flow import TestFlow
except ImportError as missing:
    raise SystemExit(f"`source .venv/bin/activate` first: {missing}")


configfile: "config.yaml"


OUTPUT = output.install(workflow)  # --verbose leaves Snakemake its own
FLOW = Pipeline.of_snakefile(config)
TESTS = TestFlow(FLOW)
programs.forget()  # jobs run references, which are untrusted code, and none of them publishes
shell.prefix(FLOW.shell_prefix)


onstart:
    FLOW.date_back()


onerror:
    OUTPUT.end()


wildcard_constraints:
    op_type="[A-Za-z0-9_]+",
    group=r"(\.\d+-of-\d+)?",
    stack="|".join(FLOW.stacks),


include: "rules/common.smk"


rule verify_all:
    """Verify every selected definition and its ground truths; print the table; fail on findings."""
    default_target: True
    input:
        planned(FLOW.verdicts),  # one that a failed job removed is made again, and the summary with it
        planned(FLOW.records),  # and so is one of these
        summary=f"{FLOW.run}/summary.json",
    log:
        f"{FLOW.run}/logs/verify_all.log",
    localrule: True
    shell:
        "python scripts/job.py conclude --summary {input.summary:q} --log {log:q}"


include: "rules/sources.smk"
include: "rules/environments.smk"
include: "rules/verify.smk"
include: "rules/tests.smk"
include: "rules/publish.smk"
include: "rules/site.smk"

# Verifies a dataset of kernel definitions; `snakemake --cores 4 verify_all`, or simply scripts/verify_all.py.
import os
import signal
import sys
from pathlib import Path

try:
    import snakemake_logger_plugin_traceproof as output
    from traceproof import runs
    from traceproof.codedigest import code_digest
    from traceproof.untrusted import tokens
    from traceproof.pipeline import ahead, interrupts
    from traceproof.ops.registry import families
    from traceproof.pipeline.flow import Pipeline
    from traceproof.stacks import ENVIRONMENTS, MAIN, READER
    from traceproof.pipeline.stages.standing import settle
    from traceproof.testgen.flow import TestFlow
    from traceproof.worker import shared
except ImportError as missing:
    sys.exit(
        f"This snakemake lacks the project ({missing}): `source .venv/bin/activate` first, "
        "which `python3 scripts/verify_all.py` sets up, or run that script alone."
    )


configfile: "config.yaml"


interrupts.quiet()
# --verbose leaves Snakemake its own output.
output.install(workflow.logger_manager, interrupts.mark)
tokens.forget()  # jobs run references, which are strangers' code, and none of them publishes
FIRST = shared.announce()  # and no process that a run of this Snakefile started
if (
    workflow.remote_exec
):  # a batch system's job, which leaves to the run's own process what is done once
    os.environ[runs.SCHEDULED] = "1"
    if FIRST:
        shared.start_for_steps()
    FIRST = False
runs.begin()
interrupts.name_mark()
shared.follow(signal.SIGINT)  # of a command that was killed
shell.prefix(interrupts.UNHEARD)

FLOW = Pipeline.of(config, root=Path.cwd())
if FIRST and not {"-n", "--dry-run", "--dryrun"} & set(sys.argv):
    settle(
        FLOW.root,
        Path(FLOW.results),
        str(FLOW.config.run),
        also=[f"{FLOW.results}/stacks", *FLOW.fetched],
        anew=["actors"] if FLOW.config.force else [],
    )
    started = os.environ.pop(ahead.STARTED, "")
    if FLOW.config.force and FLOW.on_gpu and not workflow.nodes and not started:
        AHEAD = ahead.start(FLOW)
TESTS = TestFlow(FLOW)
DRIVER = sys.executable


onstart:
    runs.claim(
        Path(FLOW.results),
        str(FLOW.config.run),
        environments=FLOW.environments_digest,
    )


wildcard_constraints:
    op_type="[A-Za-z0-9_]+",
    actor="|".join(FLOW.actors),
    shard=r"(\.\d+-of-\d+)?",
    stack="|".join(FLOW.stacks),
    environment="|".join(ENVIRONMENTS),
    family="|".join(families()),
    slug="[^/]+",


localrules:
    verify_all,
    cases,
    dataset,
    environment,
    sources,
    report,
    report_family,


rule verify_all:
    """Every selected definition against every truth; prints the table and fails on findings."""
    default_target: True
    input:
        f"{FLOW.run}/summary.json",
    log:
        f"{FLOW.run}/logs/verify_all.log",
    params:
        run=FLOW.run,
    shell:
        "{DRIVER:q} scripts/outcome.py --summary {input:q} --run {params.run:q} --log {log:q}"


include: "rules/dataset.smk"
include: "rules/extract.smk"
include: "rules/sources.smk"
include: "rules/stacks.smk"
include: "rules/cases.smk"
include: "rules/jit.smk"
include: "rules/actors.smk"
include: "rules/judge.smk"
include: "rules/report.smk"
include: "rules/tests.smk"
include: "rules/publish.smk"
include: "rules/chain.smk"
include: "rules/solutions.smk"
include: "rules/history.smk"
include: "rules/site.smk"

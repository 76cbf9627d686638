container: "traceproof.sif"  # of the Containerfile, for `--sdm apptainer`


# Inputs that are known once the checkpoint `cases` has planned.
def planned(wildcards):
    """The cases of a job's op_type."""
    checkpoints.cases.get()
    return FLOW.plan(wildcards.op_type)


def verdicts(wildcards):
    """Verdicts of all that was planned, or of one family's."""
    checkpoints.cases.get()
    return FLOW.verdicts(wildcards.get("family", ""))


def records(wildcards):
    """Records of the stacks that all of it, or a family's part, runs in."""
    checkpoints.cases.get()
    return FLOW.records(wildcards.get("family", ""))


def generated_tests(wildcards):
    """The test file of every op_type."""
    checkpoints.cases.get()
    return TESTS.files()


def tested(wildcards):
    """What the tests came to, per op_type and environment."""
    checkpoints.cases.get()
    return TESTS.rows()

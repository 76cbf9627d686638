container: "traceproof.sif"  # of the Containerfile, for `--sdm apptainer`


def planned(what):
    """An input that is known once the checkpoint `cases` has planned."""

    def found(wildcards):
        checkpoints.cases.get()
        return what(wildcards)

    return found

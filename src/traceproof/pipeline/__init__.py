"""What the Snakemake rules call: paths, interpreters, digests, and what a job takes of the machine."""

"""Set up, then verify the configured dataset: `snakemake verify_all` with all cores, and the table at the end.

Arguments go to Snakemake, for example `--cores 8`, `--dry-run` or `--config seed=1`; once it is set up,
`.venv/bin/snakemake --help` lists its own, and `.venv/bin/traceproof verify --help` what a run can be told.
Exit code: 0 fine, 1 findings, 2 bad use or input (or the run could not finish), 130 interrupted.
"""

import sys

from _setup import run

if __name__ == "__main__":
    run(__doc__, "traceproof", "verify", "--", *sys.argv[1:])

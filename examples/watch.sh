#!/bin/sh
# Take what is new, verify, and say what changed since the last run: examples/watch.sh FOLDER COMMAND [ARGUMENT ...]
#
# COMMAND takes it, e.g. `traceproof clone-repos --release sglang=newest`. FOLDER gets the difference as verdicts.md and
# verdicts.json, and verify.txt. To be run in the repository, with traceproof on PATH.
# Exit code: 0 nothing got worse, 1 something did, 2 that could not be found out.
set -u
out=${1:?"usage: examples/watch.sh FOLDER COMMAND [ARGUMENT ...]"}
shift
mkdir -p "$out" && rm -f "$out"/verdicts.* || exit 2
before=$(ls -t results/history/*.json 2>/dev/null | head -n 1) # the newest state; none in the first run
"$@" || exit 2
traceproof verify >"$out/verify.txt" 2>&1
if [ $? -gt 1 ]; then # 1 are findings: the difference tells which of them are new
    tail -n 20 "$out/verify.txt"
    exit 2
fi
traceproof diff "${before:-latest}" latest --markdown "$out/verdicts.md" --json "$out/verdicts.json"

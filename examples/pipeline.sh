#!/usr/bin/env bash
# A pipeline's post-training step: results as JSON, failures as exit codes.
#
# Usage: pipeline.sh WORK_FOLDER
set -euo pipefail
work=$1
here=$(dirname "$0")
mkdir -p "$work"

# Replace this with your training step; it writes a ZeRO-3 checkpoint.
zexport train "$work/run" --world-size 2 --stage 3 --steps 20 --json > "$work/train.json"

# Stop if the checkpoint cannot be exported.
zexport inspect "$work/run" --json > "$work/inspect.json"
python - "$work/inspect.json" <<'PY'
import json, sys
verdict = json.load(open(sys.argv[1]))["verdict"]
sys.exit(0 if verdict["exportable"] else f"not exportable: {verdict['sentence']}")
PY

# Exit codes: 0 done, 3 checkpoint, 4 not supported, 6 output, 7 verification.
zexport consolidate "$work/run" "$work/model" --dtype bf16 --json > "$work/export.json"

# Later, on any machine: does the model still match its checkpoint?
zexport verify "$work/model" --against "$work/run" --json > "$work/verify.json"

python "$here/evaluate.py" "$work/model"

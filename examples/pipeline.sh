#!/usr/bin/env bash
# A post-training step as a pipeline runs it: every result is JSON, every failure an exit code.
#
# Usage: pipeline.sh WORK_FOLDER
set -euo pipefail
work=$1
here=$(dirname "$0")
mkdir -p "$work"

# The training step of your pipeline stands here; this one writes a real ZeRO-3 checkpoint.
zexport train "$work/run" --world-size 2 --stage 3 --steps 20 --json > "$work/train.json"

# Stop early, and with a reason, if the checkpoint is not whole.
zexport inspect "$work/run" --json > "$work/inspect.json"
python - "$work/inspect.json" <<'PY'
import json, sys
verdict = json.load(open(sys.argv[1]))["verdict"]
sys.exit(0 if verdict["exportable"] else f"not exportable: {verdict['sentence']}")
PY

# 0 done · 3 checkpoint · 4 not supported · 6 output · 7 verification: the exit code says what to do.
zexport consolidate "$work/run" "$work/model" --dtype bf16 --json > "$work/export.json"

# Later, on another machine: is this still the model that was exported, and is it the checkpoint's?
zexport verify "$work/model" --against "$work/run" --json > "$work/verify.json"

python "$here/evaluate.py" "$work/model"

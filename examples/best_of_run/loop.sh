#!/usr/bin/env bash
# Train, export every checkpoint while the training goes on, evaluate each, keep the best model.
#
# Usage: loop.sh BASE_MODEL WORK_FOLDER
set -euo pipefail
base=$1
mkdir -p "$2"
work=$(realpath "$2")
here=$(realpath "$(dirname "$0")")

watch=(zexport watch "$work/run" "$work/models" --dtype bf16
  --then "bash '$here/evaluate.sh' '$work' {} {step}")

# Exports and evaluations go on while the training does; what the run rotates away is kept first.
"${watch[@]}" --interval 1 > "$work/watch.log" &
watching=$!
trap 'kill -TERM "$watching" 2> /dev/null || true' EXIT
torchrun --standalone --nproc-per-node 2 "$here/finetune.py" "$base" "$work/run"
kill -TERM "$watching"
wait "$watching" || true

# What was left when the training ended.
"${watch[@]}" --once >> "$work/watch.log"

python "$here/keep_best.py" "$work"

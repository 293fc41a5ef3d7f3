#!/usr/bin/env bash
# Train, export and evaluate every checkpoint meanwhile, keep the best model.
#
# Usage: loop.sh BASE_MODEL WORK_FOLDER
set -euo pipefail
base=$1
mkdir -p "$2"
work=$(realpath "$2")
here=$(realpath "$(dirname "$0")")

# --then runs no shell: it splits the words, and {} and {step} become the export and its step.
watch=(zexport watch "$work/run" "$work/models" --dtype bf16
  --then "bash '$here/evaluate.sh' '$work' {} {step}")

# Export and evaluate during training.
"${watch[@]}" --interval 1 > "$work/watch.log" &
watching=$!
trap 'kill -TERM "$watching" 2> /dev/null || true' EXIT
torchrun --standalone --nproc-per-node 2 "$here/finetune.py" "$base" "$work/run"
kill -TERM "$watching"
wait "$watching" || true

# Export and evaluate what is left after training.
"${watch[@]}" --once >> "$work/watch.log"

python "$here/keep_best.py" "$work"

#!/usr/bin/env bash
# Evaluate one export with lm-eval, on the task in this folder.
#
# Usage: evaluate.sh WORK_FOLDER EXPORT STEP
set -euo pipefail
cd "$(dirname "$0")"
lm_eval --model hf --model_args "pretrained=$2,dtype=float32" --tasks tide --include_path . \
  --device cpu --batch_size 1 --output_path "$1/scores/step-$3.json"

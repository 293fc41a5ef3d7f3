#!/usr/bin/env bash
# Train a tiny model on two ranks with DeepSpeed ZeRO-3, inspect the checkpoint, export and verify a
# model folder, generate text with transformers, then reshard for three ranks and resume.
# One minute; writes to ./demo. Run it with `make demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf demo

say() {
    printf '\n$'
    printf ' %q' "$@"
    printf '\n'
    "$@"
}

say zexport train demo/run --world-size 2 --stage 3 --steps 200
say zexport inspect demo/run
say zexport consolidate demo/run demo/model
say zexport verify demo/model --against demo/run
say python examples/generate.py demo/model "The tide"
say zexport reshard demo/run demo/on-3 -n 3
say zexport train demo/on-3 --resume --steps 210

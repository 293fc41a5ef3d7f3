#!/usr/bin/env bash
# From nothing to generated text, and on from there: train a tiny model on two ranks with DeepSpeed
# ZeRO-3, look at the checkpoint, turn it into a Hugging Face model folder, load that with transformers
# and let it speak; then cut the checkpoint anew for three ranks, which go on with the training.
# It takes about a minute; everything is written to ./demo. Run it as `make demo`.
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

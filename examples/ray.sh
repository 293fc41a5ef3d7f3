#!/bin/bash
# Export one checkpoint with all nodes of the Ray cluster that this runs in. Interrupted or failed, it
# is run again and goes on.
#
#   ray job submit -- bash ray.sh run/checkpoint-1000 model
#
set -eu
zexport consolidate "$1" "$2" --ray auto --quiet

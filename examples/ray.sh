#!/bin/bash
# Export one checkpoint with all nodes of this Ray cluster. After a failure, submit it again.
#
#   ray job submit -- bash ray.sh run/checkpoint-1000 model
#
set -eu
zexport consolidate "$1" "$2" --ray auto --quiet

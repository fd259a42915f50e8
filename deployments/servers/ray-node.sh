#!/usr/bin/env bash
# One more node of the cluster, with the head's token in RAY_AUTH_TOKEN_PATH.
# Usage: PENSTOCK_HOST=10.0.0.6 ray-node.sh 10.0.0.5:6379 [options of `ray start`]
set -euo pipefail
. "$(dirname "$0")/settings.sh"

export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH="${RAY_AUTH_TOKEN_PATH:-$PENSTOCK_SERVERS/ray-token}"

exec ray start --block --address="$1" --node-ip-address="$PENSTOCK_HOST" "${@:2}"

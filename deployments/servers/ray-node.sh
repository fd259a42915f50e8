#!/usr/bin/env bash
# One more node of the cluster. Usage: ray-node.sh HEAD:6379, with the head's token in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH.
set -euo pipefail
. "$(dirname "$0")/settings.sh"

export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH="${RAY_AUTH_TOKEN_PATH:-$PENSTOCK_SERVERS/ray-token}"

exec ray start --block --address="$1" --node-ip-address="$PENSTOCK_HOST" "${@:2}"

#!/usr/bin/env bash
# The head of a Ray cluster. Without one, penstock starts a small Ray on the worker's machine for each run.
# Usage: PENSTOCK_HOST=10.0.0.5 ray-head.sh [options of `ray start`]
#
# Who reaches a Ray port without a token runs code on every node. Every node, and every penstock worker, needs the same token.
set -euo pipefail
. "$(dirname "$0")/settings.sh"

export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH="${RAY_AUTH_TOKEN_PATH:-$PENSTOCK_SERVERS/ray-token}"
if [ ! -e "$RAY_AUTH_TOKEN_PATH" ]; then
    (umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > "$RAY_AUTH_TOKEN_PATH")
fi

if [ "$PENSTOCK_HOST" = 127.0.0.1 ]; then
    # Ray would replace it by the machine's own address, and listen there.
    echo "set PENSTOCK_HOST to this machine's address in a private network; on one machine no head is needed" >&2
    exit 2
fi

# --node-ip-address is what other nodes connect to: an address of a private network, never a public one.
# Ray's ports are open on all interfaces whatever is said here.
exec ray start --head --block --node-ip-address="$PENSTOCK_HOST" --port="${RAY_PORT:-6379}" --include-dashboard=false "$@"

#!/usr/bin/env bash
# A Prefect worker: performs the runs of deployments, each in a process of its own. Usage: worker.sh [POOL]
#
# Its environment is the runs' environment: AWS_* keys, MLFLOW_TRACKING_URI, RAY_ADDRESS, RAY_AUTH_TOKEN belong here, not in Prefect.
set -euo pipefail
. "$(dirname "$0")/settings.sh"

export PREFECT_API_URL="${PREFECT_API_URL:-http://127.0.0.1:4200/api}"

# A shell that starts a program with `&` makes it ignore SIGINT, and this worker turns its first SIGTERM into a SIGINT: it would live
# on and go on taking runs. A shell cannot undo that, Python can.
exec python -c 'import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])' \
    prefect worker start --type process --pool "${1:-penstock}"

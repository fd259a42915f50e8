#!/usr/bin/env bash
# The Prefect server: schedules, states, the page at http://127.0.0.1:4200. Ctrl-C ends it; start it again and everything is there.
set -euo pipefail
. "$(dirname "$0")/settings.sh"

export PREFECT_HOME="${PREFECT_HOME:-$PENSTOCK_SERVERS/prefect}"

# SQLite in PREFECT_HOME is enough for a few pipelines. For more, PostgreSQL:
#   export PREFECT_API_DATABASE_CONNECTION_URL=postgresql+asyncpg://USER:PASSWORD@HOST/prefect

# A deployment's limit of one run is a lease that the run renews. Kept in memory, as is the default, it is lost when the server restarts,
# and the server then stops the run: a restart at night would cost the training.
export PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=prefect.server.concurrency.lease_storage.filesystem

exec prefect server start --host "$PENSTOCK_HOST" --port "${PREFECT_PORT:-4200}" "$@"

# Sourced by the scripts beside it: what all servers have in common. Override any of it in the environment.

# Where the servers keep their state.
: "${PENSTOCK_SERVERS:=$HOME/.local/state/penstock}"
mkdir -p "$PENSTOCK_SERVERS"

# Loopback only, unless you say otherwise. None of these servers asks who is calling (docs/deploy.md).
: "${PENSTOCK_HOST:=127.0.0.1}"

# Three spellings, because no two of the projects read the same one.
export DO_NOT_TRACK="${DO_NOT_TRACK:-true}"
export MLFLOW_DISABLE_TELEMETRY="${MLFLOW_DISABLE_TELEMETRY:-true}"
export PREFECT_SERVER_ANALYTICS_ENABLED="${PREFECT_SERVER_ANALYTICS_ENABLED:-false}"
export RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}"

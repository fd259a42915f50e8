#!/usr/bin/env bash
# The MLflow server: metrics, checkpoints, models, the page at http://127.0.0.1:5000.
set -euo pipefail
. "$(dirname "$0")/settings.sh"

# PostgreSQL instead: postgresql+psycopg://USER:PASSWORD@HOST/mlflow  (pip install 'penstock[postgres]')
export MLFLOW_BACKEND_STORE_URI="${MLFLOW_BACKEND_STORE_URI:-sqlite:///$PENSTOCK_SERVERS/mlflow.db}"
# S3 instead: s3://bucket/mlflow, with AWS_* (and MLFLOW_S3_ENDPOINT_URL for another S3 than Amazon's) in this environment.
export MLFLOW_ARTIFACTS_DESTINATION="${MLFLOW_ARTIFACTS_DESTINATION:-$PENSTOCK_SERVERS/mlflow-artifacts}"

# As shipped the server is 15 processes. The job runner serves evaluation features that penstock does not use.
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false

exec mlflow server --host "$PENSTOCK_HOST" --port "${MLFLOW_PORT:-5000}" --workers 1 "$@"

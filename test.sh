#!/usr/bin/env bash
# Prove everything. ./test.sh [pytest arguments]: the same environment as run.sh plus the test tools, then all tests.
cd "$(dirname "${BASH_SOURCE[0]}")"
source ./run.sh
ensure_environment requirements.txt tests/requirements.txt
exec "$PYTHON" -m pytest "$@"

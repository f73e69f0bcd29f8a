#!/usr/bin/env bash
# Prove everything. ./test.sh [pytest arguments]: run.sh's environment plus what records/ and the tests need, then all tests.
cd "$(dirname "${BASH_SOURCE[0]}")"
source ./run.sh
ensure_environment requirements.txt records/requirements.txt tests/requirements.txt
exec "$PYTHON" -m pytest "$@"

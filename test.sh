#!/usr/bin/env bash
# Prove everything. ./test.sh [pytest arguments]: run.sh's environment plus what records/ and the tests need, then all tests.
#   SCRIPT=ideas/idea.py ./test.sh              the recipe's tests alone, of an idea
cd "$(dirname "${BASH_SOURCE[0]}")"
source ./run.sh
[[ -n ${SCRIPT-} && $# == 0 ]] && set -- tests/recipe
ensure_environment requirements.txt records/requirements.txt tests/requirements.txt
# Files of tests side by side, one more than cores, as some wait for processes, and the slow ones not last; one after the other
# where they would share a GPU.
workers=$("$PYTHON" -c 'import os, torch; print(0 if torch.cuda.is_available() else min(4, 1 + len(os.sched_getaffinity(0))))')
exec "$PYTHON" -m pytest --numprocesses="$workers" --dist=loadfile --no-loadscope-reorder "$@"

#!/usr/bin/env bash
# Run the tests: ./test.sh [pytest arguments]. All but the slow ones, unless -m says otherwise.
#   ./test.sh -m slow                  the rest
#   SCRIPT=ideas/idea.py ./test.sh     the recipe's tests, on a copy of train_gpt.py
set -euo pipefail
here=$PWD
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
if [[ ${SCRIPT-} ]]; then
    [[ $SCRIPT == /* || ! -f $here/$SCRIPT ]] || export SCRIPT=$here/$SCRIPT
    [[ -f $SCRIPT ]] || { echo "test.sh: error: no such script: SCRIPT=$SCRIPT" >&2; exit 2; }
    [[ $* == *tests/* ]] || set -- "$@" tests/recipe
fi
cores=$(python3 -c 'import os; print(len(os.sched_getaffinity(0)))' 2>/dev/null) || # taskset's
    cores=$(getconf _NPROCESSORS_ONLN)
workers=$((cores < 16 ? cores + 1 : 16)) # one more than cores, as some tests wait for processes
[[ ! -e /dev/nvidia0 ]] || workers=0     # they would share a GPU
exec ./run.sh -m pytest --numprocesses="$workers" --dist=loadfile -m "not slow" "$@"

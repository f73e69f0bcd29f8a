#!/usr/bin/env bash
# Prove everything. ./test.sh [pytest arguments]: run.sh's environment plus what records/ and the tests need, then all tests.
#   SCRIPT=ideas/idea.py ./test.sh              the recipe's tests alone, of an idea
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@"  # as by sh test.sh
set -euo pipefail
[[ -d ${PWD-} ]] || { echo "test.sh: error: the current folder is gone or may not be searched: change into another" >&2; exit 1; }
stands=$PWD
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
[[ -n ${SCRIPT-none} ]] || { echo "test.sh: error: SCRIPT is empty: unset it, or name a script (is a shell variable not set?)" >&2; exit 1; }
if [[ -n ${SCRIPT-} ]]; then  # as run.sh finds it: where the user stands, else in the project
    for path in "$SCRIPT" "$stands/$SCRIPT" "$PWD/$SCRIPT"; do [[ $path == /* && -f $path ]] && break; done
    [[ -f $path ]] || { echo "test.sh: error: no such script: SCRIPT=$SCRIPT, in $stands or $PWD" >&2; exit 1; }
    [[ $path == *.py ]] || { echo "test.sh: error: SCRIPT=$SCRIPT is no training script, such as train_gpt.py" >&2; exit 1; }
    export SCRIPT=$path
fi
python=$(command -v python3 || command -v python) || { echo "test.sh: error: no python3 on the PATH" >&2; exit 1; }
python=$("$python" launch/environment.py --for=test.sh requirements.txt records/requirements.txt tests/requirements.txt)
python=${python##*$'\n'}  # Python's start-up files may print before it
before= named= alone=
for argument; do  # pytest's own words are lost where its workers start
    case $before in *=*) value= ;; -[kmnpcorW] | -[!-]*[kmnpcorW] | --*) value=yes ;; *) value= ;; esac
    if [[ $argument != -* && -e ${argument%%::*} ]]; then
        named=yes
        [[ $argument != *::* ]] || alone=yes
    elif [[ ! $value && $argument != -* ]]; then
        echo "test.sh: error: no such tests: $argument, in $PWD" >&2
        exit 1
    fi
    before=$argument
done
[[ $named || -z ${SCRIPT-} ]] || set -- "$@" tests/recipe
# Files of tests side by side, one more than cores, as some wait for processes, the slowest first (tests/conftest.py); one after
# the other where they would share a GPU, and named tests, so that pytest says which of them are none.
workers=${alone:+0}
[[ $workers ]] ||
    workers=$("$python" -c 'import os, torch; print(0 if torch.cuda.is_available() else min(4, 1 + len(os.sched_getaffinity(0))))')
exec "$python" -m pytest --numprocesses="$workers" --dist=loadfile --no-loadscope-reorder "$@"

#!/usr/bin/env bash
# Train. ./run.sh [script.py] [--option=value …]: environment, data, launch. From any folder.
#   ./run.sh                                       the record preset on GPUs, the demo without
#   ./run.sh ideas/idea.py --num_scheduled_iterations=200
#   RANKS=1 ./run.sh                               other than one rank for each GPU, or two on CPU
# When sourced (test.sh does), it only defines its functions.
set -euo pipefail

# Prints nothing and fails unless the given python has every package of the requirements files (torch from 2.11 on).
has_requirements() {
    "$1" - "${@:2}" <<'PYTHON' 2>/dev/null
import re, sys
from importlib.metadata import version

for path in sys.argv[1:]:
    for line in open(path):
        if name := re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line):
            found = version(name[0])
            if name[0] == "torch" and tuple(map(int, found.split(".")[:2])) < (2, 11):
                sys.exit(1)
PYTHON
}

# Sets PYTHON to an interpreter that has the packages of the given requirements files: the active one, or that of .venv.
ensure_environment() {
    PYTHON=$(command -v python3 || command -v python) || { echo "run.sh: no python3 on the PATH" >&2; exit 1; }
    has_requirements "$PYTHON" "$@" && return
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        { echo "run.sh: $PYTHON is older than Python 3.11" >&2; exit 1; }
    if [[ ! -x .venv/bin/python ]]; then
        echo "run.sh: making .venv"
        "$PYTHON" -m venv .venv
    fi
    PYTHON=$PWD/.venv/bin/python
    has_requirements "$PYTHON" "$@" && return
    echo "run.sh: installing into .venv (minutes, the first time)"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check "${@/#/--requirement=}"
}

# The value of --name=value or --name value among the arguments after the name.
option() {
    local name=$1 value=""
    shift
    while (($#)); do
        case $1 in
            "--$name="*) value=${1#*=} ;;
            "--$name") value=${2-} ;;
        esac
        shift
    done
    echo "$value"
}

main() {
    local script=train_gpt.py from=$PWD
    cd "$(dirname "${BASH_SOURCE[0]}")"
    if [[ ${1-} == *.py ]]; then # where the user stands, else in the project
        script=$1
        [[ $script != /* && -f $from/$script ]] && script=$from/$script
        shift
    fi
    [[ -f $script ]] || { echo "run.sh: no such script: $script, in $from or $PWD" >&2; exit 1; }
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # for a script elsewhere; one in a tree of its own finds that first
    ensure_environment requirements.txt
    case " $* " in *" --help "* | *" -h "*) exec "$PYTHON" "$script" --help ;; esac

    # One rank for each GPU, as many as share the 8 micro-batches evenly; two on CPU.
    local gpus ranks preset
    gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
    ranks=2
    for n in 1 2 4 8; do ((gpus >= n)) && ranks=$n; done
    ranks=${RANKS:-$ranks}

    preset=$(option preset "$@")
    if [[ -z $(option data "$@") ]]; then
        if [[ ${preset:-$( ((gpus)) && echo record || echo demo)} == record ]]; then
            "$PYTHON" data/cached_fineweb10B.py
        else
            "$PYTHON" data/local_text.py
        fi
    fi
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the script divides the cores itself
    exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node="$ranks" "$script" "$@"
}

[[ ${BASH_SOURCE[0]} == "$0" ]] && main "$@"
true

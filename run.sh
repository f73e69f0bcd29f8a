#!/usr/bin/env bash
# Train. ./run.sh [script.py] [--option=value …]: launch/environment.py, then launch/start.py. From any folder.
#   ./run.sh                                       the record preset on GPUs, the demo without
#   ./run.sh ideas/idea.py --num_scheduled_iterations=200
#   RANKS=1 ./run.sh                               other than one rank for each GPU, or two on CPU
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@"  # as by sh run.sh
set -euo pipefail
[[ -d ${PWD-} ]] || { echo "run.sh: error: the current folder is gone or may not be searched: change into another" >&2; exit 1; }
root=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
python=$(command -v python3 || command -v python) || { echo "run.sh: error: no python3 on the PATH" >&2; exit 1; }
exec "$python" "$root/launch/environment.py" --for=run.sh "$root/requirements.txt" --then "$root/launch/start.py" "$@"

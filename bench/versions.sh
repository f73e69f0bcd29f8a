#!/usr/bin/env bash
# Does the CPU part of the tests pass with each PyTorch that the trainer is meant for, and the Triton that its CUDA builds bring?
#   bench/versions.sh FOLDER [pytest arguments]         environments in FOLDER, made once: 5 GB each where pip has CUDA builds only
#   VERSIONS=2.11.0:3.6.0:2.3.5 bench/versions.sh FOLDER      some of them, PyTorch:Triton:NumPy
# Triton 3.6's interpreter needs a NumPy before 2.4: it takes an array of one element for a number.
# Ends with a line for each version; exit code 1 if one has failed.
set -uo pipefail
folder=${1:?"usage: bench/versions.sh FOLDER [pytest arguments]"}
case $folder in
    -h | --help) sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}"; exit ;;
    -*) echo "bench/versions.sh: error: $folder is no folder: usage: bench/versions.sh FOLDER [pytest arguments]" >&2; exit 2 ;;
esac
if [[ -n ${VERSIONS-} && ! $VERSIONS =~ [^[:space:]] ]]; then
    echo "bench/versions.sh: error: VERSIONS is blank: unset it, or name PyTorch:Triton:NumPy (is a shell variable not set?)" >&2
    exit 2
fi
mkdir -p "$folder" && folder=$(CDPATH= cd "$folder" && pwd) || exit 1
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python=$(command -v python3 || command -v python) || { echo "bench/versions.sh: no python3 on the PATH" >&2; exit 1; }

# Makes the environment AT: the project's requirements, with this PyTorch, Triton and NumPy in place of those that they name.
# AT/made holds those that it has.
make_environment() {
    local at=$1 part wanted
    wanted=$(
        printf '%s\n' "torch==$2" "triton==$3" "numpy==$4"
        for part in . records tests; do
            grep -vE '^(torch|triton|numpy)\b' "$part/requirements.txt"
        done
    )
    [[ -f $at/made && $(< "$at/made") == "$wanted" ]] && return
    "$python" -m venv "$at" && printf '%s\n' "$wanted" > "$at/requirements.txt" || return
    "$at/bin/python" -m pip install --quiet --disable-pip-version-check --requirement="$at/requirements.txt" &&
        mv "$at/requirements.txt" "$at/made"
}

# What is there, whatever was asked for.
installed='from importlib.metadata import version
print("torch {}, Triton {}, NumPy {}".format(*map(version, ("torch", "triton", "numpy"))))'

results=() failed=0
for versions in ${VERSIONS:-2.11.0:3.6.0:2.3.5 2.13.0:3.7.1:2.4.6}; do
    IFS=: read -r version triton numpy <<< "$versions"
    export VIRTUAL_ENV=$folder/$version-$triton-$numpy
    if ! make_environment "$VIRTUAL_ENV" "$version" "$triton" "$numpy" ||
        ! found=$("$VIRTUAL_ENV/bin/python" -c "$installed"); then
        results+=("torch $version, Triton $triton, NumPy $numpy: no environment, see above") failed=1
        continue
    fi
    log=$VIRTUAL_ENV.log
    echo "$found: running, output in $log"
    PATH=$VIRTUAL_ENV/bin:$PATH CUDA_VISIBLE_DEVICES="" "$VIRTUAL_ENV/bin/python" -m pytest --dist=loadfile -n "${WORKERS:-2}" \
        -m "not gpu" "${@:2}" > "$log" 2>&1 || failed=1
    results+=("$found: $(grep -E '[0-9]+ (passed|failed|error)' "$log" | tail -1 || echo "no test ran")")
done
printf '%s\n' "${results[@]}"
exit "$failed"

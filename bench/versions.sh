#!/usr/bin/env bash
# Does the CPU part of the tests pass with each PyTorch that the trainer is meant for, and the Triton that its CUDA builds bring?
#   bench/versions.sh FOLDER [pytest arguments]         environments in FOLDER, made once: 5 GB each where pip has CUDA builds only
#   VERSIONS=2.11.0:3.6.0:2.3.5 bench/versions.sh FOLDER      some of them, PyTorch:Triton:NumPy
# Triton 3.6's interpreter needs a NumPy before 2.4: it takes an array of one element for a number.
# Ends with a line for each version; exit code 1 if one has failed.
set -uo pipefail
folder=${1:?"usage: bench/versions.sh FOLDER [pytest arguments]"}
if [[ -n ${VERSIONS-} && ! $VERSIONS =~ [^[:space:]] ]]; then
    echo "bench/versions.sh: error: VERSIONS is blank: unset it, or name PyTorch:Triton:NumPy (is a shell variable not set?)" >&2
    exit 2
fi
mkdir -p "$folder" && folder=$(CDPATH= cd "$folder" && pwd) || exit 1
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python=$(command -v python3 || command -v python) || { echo "bench/versions.sh: no python3 on the PATH" >&2; exit 1; }

# Makes FOLDER/VERSION: the project's requirements, with this PyTorch, Triton and NumPy in place of those that they name.
make_environment() {
    local at=$folder/$1 part
    [[ -f $at/made ]] && return
    "$python" -m venv "$at" || return
    for part in . records tests; do
        grep -vE '^(torch|triton|numpy)\b' "$part/requirements.txt"
    done > "$at/requirements.txt"
    "$at/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$1" "triton==$2" "numpy==$3" \
        --requirement="$at/requirements.txt" && touch "$at/made"
}

results=() failed=0
for versions in ${VERSIONS:-2.11.0:3.6.0:2.3.5 2.13.0:3.7.1:2.4.6}; do
    IFS=: read -r version triton numpy <<< "$versions"
    if ! make_environment "$version" "$triton" "$numpy"; then
        results+=("torch $version, Triton $triton, NumPy $numpy: no environment, see above") failed=1
        continue
    fi
    log=$folder/$version.log
    echo "torch $version, Triton $triton, NumPy $numpy: running, output in $log"
    export VIRTUAL_ENV=$folder/$version
    PATH=$VIRTUAL_ENV/bin:$PATH CUDA_VISIBLE_DEVICES="" "$VIRTUAL_ENV/bin/python" -m pytest --dist=loadfile -n "${WORKERS:-2}" \
        -m "not gpu" "${@:2}" > "$log" 2>&1 || failed=1
    results+=("torch $version, Triton $triton, NumPy $numpy: $(grep -E '[0-9]+ (passed|failed|error)' "$log" | tail -1 || echo "no test ran")")
done
printf '%s\n' "${results[@]}"
exit "$failed"

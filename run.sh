#!/usr/bin/env bash
# Train, or run a tool, from any folder.
#   ./run.sh [ideas/idea.py] [--option=value …]      train_gpt.py or a copy of it: runtime/launch.py
#   ./run.sh data/… | records/… | bench/… | sample.py [argument …]      a tool
# Uses your environment if the packages are there, otherwise creates .venv.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P)
venv=$root/.venv/bin/python
path=${1-}
[[ -f $path ]] || path=$root/$path
files=("$root/requirements.txt")
program=("$path" "${@:2}")
case $(readlink -f -- "$path") in
"$root"/records/*/* | "$root"/bench/*/*) program=("$root/runtime/launch.py" "$@") ;; # an old log's script
"$root"/records/*.py) files+=("$root/records/requirements.txt") ;;
"$root"/bench/*.py | "$root"/data/*.py | "$root"/sample.py) ;;
*) program=("$root/runtime/launch.py" "$@") ;;
esac
if [[ ${1-} == -m ]]; then # python -m pytest, for test.sh
    files+=("$root/records/requirements.txt" "$root/tests/requirements.txt")
    program=("$@")
fi

missing_packages() { # of an interpreter
    "$1" - "${files[@]}" 2>/dev/null <<'EOF' || echo "Python 3.11"
import platform, re, sys
from importlib.metadata import version

assert sys.version_info >= (3, 11)
numbers = lambda text: [int(x) for x in re.match(r"\d+(\.\d+)*", text)[0].split(".")]
has_triton = (platform.system(), platform.machine()) == ("Linux", "x86_64")
line, missing = re.compile(r"^([\w-]+)==[^;#]*(;[^#]*)?# from ([\d.]*\d)", re.M), []
for name, marker, oldest in line.findall("".join(open(path).read() for path in sys.argv[1:])):
    try:
        there = numbers(version(name)) >= numbers(oldest)
    except ImportError:
        there = False
    if not there and (has_triton or not marker):
        missing.append(f"{name} {oldest}")
print(*missing, sep=", ")
EOF
}

fill_venv() {
    echo "run.sh: $python lacks $missing: installing into .venv (minutes the first time)" >&2
    "$venv" -c "" 2>/dev/null || "$python" -m venv --clear "$root/.venv"
    "$venv" -m pip --version >/dev/null 2>&1 || "$venv" -m ensurepip >/dev/null
    if ! command -v nvidia-smi >/dev/null && [[ ! -e /dev/nvidia0 ]]; then # the CPU build saves gigabytes
        torch=$(grep -o '^torch==[0-9.]*' "$root/requirements.txt")
        "$venv" -m pip install -qq --no-deps --retries=1 "$torch" \
            --extra-index-url=https://download.pytorch.org/whl/cpu
    fi
    "$venv" -m pip install -qq "${files[@]/#/--requirement=}"
    if nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -q '^9\.0'; then
        said=$(timeout 600 "$venv" -m pip install -qq --retries=1 --timeout=15 --disable-pip-version-check \
            --constraint="$root/requirements.txt" \
            --requirement="$root/runtime/requirements-hopper.txt" 2>&1) ||
            echo "run.sh: no FlashAttention 4, steps take an estimated 4 to 8 % longer: ${said##*$'\n'}" >&2
    fi
}

fail() {
    echo "run.sh: error: $1" >&2
    exit 1
}

python=$(command -v python3 || command -v python) || fail "no python3 on the PATH"
missing=$(missing_packages "$python")
if [[ $missing ]]; then
    if [[ $(missing_packages "$venv") ]]; then
        [[ $missing != "Python 3.11" ]] || fail "$python is older than Python 3.11"
        fill_venv
    fi
    python=$venv
fi
exec "$python" "${program[@]}"

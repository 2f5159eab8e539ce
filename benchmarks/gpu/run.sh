#!/usr/bin/env bash
# All figures that need a GPU, in ten minutes, on a machine that has torch for CUDA; see benchmarks/gpu/bench.py.
#   benchmarks/gpu/run.sh --pack [FOLDER]          before, where there is a registry: the other packages, as wheels to carry there
#   benchmarks/gpu/run.sh [--list] [--rows NAME…] [--smoke] [--seconds N] [--output FILE]
# PYTHON chooses the interpreter, PACKAGES the folder of --pack (default: benchmarks/gpu/packages, which git ignores); where OUT is
# set, results and log go there.
set -euo pipefail
shopt -s nullglob

here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}

refuse() {
    echo "$*" >&2
    exit 2
}

pack() { # FOLDER
    mkdir -p "$1"
    local path glibc words=()
    for path in "$1"/*; do
        [[ $path == *.whl ]] || refuse "$1 cannot be packed into, it holds ${path##*/}: name a new folder."
    done
    rm -f "$1"/*.whl
    echo '*' >"$1/.gitignore"
    for glibc in 39 35 34 31 28 27 26 24 17 12; do words+=(--platform "manylinux_2_${glibc}_x86_64"); done
    for glibc in 2014 2010 1; do words+=(--platform "manylinux${glibc}_x86_64"); done
    words+=(--quiet --disable-pip-version-check --only-binary=:all: --python-version 3.12 --implementation cp)
    words+=(--constraint "$here/../../constraints.txt" --dest "$1")
    "$python" -m pip download "${words[@]}" transformers filelock jinja2 rich typer
    "$python" -m pip download "${words[@]}" --no-deps accelerate psutil # accelerate needs torch, which is there
    du -sh "$1"
}

unpack() { # FOLDER SITE
    local wheel wheels=("$1"/*.whl) apart
    ((${#wheels[@]})) || refuse "$1 holds no wheels: write them with benchmarks/gpu/run.sh --pack $1."
    for wheel in "${wheels[@]}"; do
        # Others of the machine's packages are built against its own numpy.
        if [[ $wheel == */numpy-* ]] && "$python" -c 'import numpy' 2>/dev/null; then continue; fi
        "$python" -m zipfile -e "$wheel" "$2" 2>/dev/null || refuse "$wheel is no wheel: pack again."
    done
    # Where a wheel keeps modules apart from its root, an installer would move them.
    for apart in "$2"/*.data/{purelib,platlib}; do cp -r "$apart/." "$2"; done
}

if [[ ${1-} == --pack ]]; then
    pack "${2:-$here/packages}"
    exit
fi
packages=$(realpath -m "${PACKAGES:-$here/packages}")
if [[ -n ${PACKAGES-} && ! -d $packages ]]; then
    refuse "PACKAGES=$PACKAGES is no folder: make it with benchmarks/gpu/run.sh --pack $PACKAGES."
fi
cd "$here/../.."
export COLUMNS=${COLUMNS:-140} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
path=$PWD:$PWD/benchmarks
if [[ -d $packages ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    unpack "$packages" "$site"
    path=$path:$site
fi
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}"
# What starting took is part of the ten minutes; whoever names other seconds, later in the line, has them.
measure=("$python" benchmarks/gpu/bench.py --seconds $((570 - SECONDS)) "$@")
if [[ -n ${OUT-} ]]; then
    mkdir -p "$OUT"
    "${measure[@]}" 2>&1 | tee "$OUT/gpu.log"
else
    "${measure[@]}"
fi

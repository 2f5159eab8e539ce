#!/usr/bin/env bash
# All figures that need a GPU, in ten minutes, on a machine that has torch for CUDA; see benchmarks/gpu.py.
#   benchmarks/gpu.sh --pack [FOLDER]          before, where there is a registry: the other packages; see gpu_pack.py
#   benchmarks/gpu.sh [--list] [--rows NAME…] [--smoke] [--seconds N] [--output FILE]
# PYTHON chooses the interpreter, PACKAGES the folder of --pack; where OUT is set, results and log go there.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
if [[ ${1-} == --pack ]]; then
    exec "$python" "$here/gpu_pack.py" pack "${@:2}"
fi
packages=$(realpath -m "${PACKAGES:-$here/packages}")
if [[ -n ${PACKAGES-} && ! -d $packages ]]; then
    echo "PACKAGES=$PACKAGES is no folder: make it with benchmarks/gpu.sh --pack $PACKAGES." >&2
    exit 2
fi
cd "$here/.."
export COLUMNS=${COLUMNS:-140} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
path=$PWD
if [[ -d $packages ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" benchmarks/gpu_pack.py unpack "$packages" "$site"
    path=$path:$site
fi
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}"
# What starting took is part of the ten minutes; whoever names other seconds, later in the line, has them.
measure=("$python" benchmarks/gpu.py --seconds $((570 - SECONDS)) "$@")
if [[ -n ${OUT-} ]]; then
    mkdir -p "$OUT"
    "${measure[@]}" 2>&1 | tee "$OUT/gpu.log"
else
    "${measure[@]}"
fi

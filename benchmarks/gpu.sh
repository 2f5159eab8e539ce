#!/usr/bin/env bash
# All figures that need an accelerator, in under nine minutes on one H200; see benchmarks/gpu.py.
#   benchmarks/gpu.sh [--smoke] [--output FILE]      PYTHON=… chooses the interpreter
set -euo pipefail

cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
arguments=("$@")
if [[ " $* " != *" --smoke "* && " $* " != *" --output "* ]]; then
    arguments+=(--output benchmarks/results/gpu_qwen3_8b.json)
fi
export TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# The file holds every figure that was ready when the time ran out.
exec timeout --kill-after=10 540 "$python" benchmarks/gpu.py "${arguments[@]+"${arguments[@]}"}"

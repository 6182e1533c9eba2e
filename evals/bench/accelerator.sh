#!/usr/bin/env bash
# Kernels on the accelerator at hand: numerics against float64, then timings. Needs no network and under 9 minutes.
# JSON and Markdown go into the folder given; parts that are already there are not run again.
#
#   evals/bench/accelerator.sh DIRECTORY [flags of python3 -m evals.bench.accelerator]
set -euo pipefail
if (($# < 1)); then
  echo "usage: $0 DIRECTORY [--tiny] [--part=NAME]" >&2
  exit 2
fi
out=$(realpath -m "$1")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHONPATH=. exec python3 -m evals.bench.accelerator --out="$out" "$@"

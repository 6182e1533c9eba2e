#!/usr/bin/env bash
# Kernels on the accelerator at hand: scattered splices against float64, bandwidth, the other numerics, what they are
# compared with. Needs no network. One run stops within 9 minutes; the same command goes on where it was stopped, for
# rows go into the folder given as they come and are not made again. All of it takes two or three runs.
#
#   evals/bench/accelerator.sh DIRECTORY [flags of python3 -m evals.bench.accelerator]
set -euo pipefail
if (($# < 1)); then
  echo "usage: $0 DIRECTORY [--tiny] [--part=NAME] [--limit=SECONDS]" >&2
  exit 2
fi
out=$(realpath -m "$1")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHONPATH=. exec python3 -m evals.bench.accelerator --out="$out" "$@"

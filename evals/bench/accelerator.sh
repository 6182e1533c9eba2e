#!/usr/bin/env bash
# Kernels on the accelerator at hand: every kernel against float64, then timings beside XLA. Needs no network.
# One run stops within 9 minutes; the same command goes on where it was stopped. --tiny shows on a CPU that all runs.
#
#   bash evals/bench/accelerator.sh [--tiny] [--out=DIRECTORY]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHONPATH=. exec python3 -m evals.bench.accelerator "$@"

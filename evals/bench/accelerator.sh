#!/usr/bin/env bash
# Kernels on the accelerator at hand: every kernel against XLA and float64, then times beside XLA, a session's step and
# an evaluation. Needs no network. One run stops within 9 minutes; the same command goes on where it was stopped.
# --tiny shows on a CPU that all runs; --interpret=gpu or tpu then interprets these kernels.
#
#   bash evals/bench/accelerator.sh [--tiny] [--interpret=gpu|tpu] [--out=DIRECTORY]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHONPATH=. exec python3 -m evals.bench.accelerator "$@"

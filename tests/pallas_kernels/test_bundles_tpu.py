"""The bundles of the TPU kernels, as the compiler's own dump counts them. Needs the extra `kernels`, not a TPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
]

WHOLE = {
    ("rotate_patch", "v5e:2x2"): 2924,
    ("rotate_patch", "v6e:2x2"): 1889,
    ("splice", "v5e:2x2"): 2583,
    ("splice", "v6e:2x2"): 1531,
}
"""Bundles for 384 tokens of 4 heads in bfloat16, rank 0, when kernels took every block whole (libtpu 0.0.50)."""
BAR = 0.35


def counted(*flags: str) -> dict[tuple[str, str], int]:
    """What the program counts for 4 heads of bfloat16; a process of its own, for libtpu reads its flags once."""
    command = [sys.executable, "-m", "pallas_kernels.bundles", "--json", "--heads=4", "--dtype=bfloat16", "--rank=0"]
    done = subprocess.run(
        [*command, *flags], env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(row["operation"], row["topology"]): row["bundles"] for row in rows}


def test_four_heads_take_a_third_of_the_bundles_of_whole_blocks():
    by_pairs, whole = counted(), counted("--whole")
    assert set(by_pairs) == set(WHOLE)
    for case, bundles in by_pairs.items():
        assert bundles <= BAR * WHOLE[case], case
        # The same compiler's count of whole blocks, whose copies have become shorter since: a ratio beside the bar.
        assert bundles <= 0.4 * whole[case], case

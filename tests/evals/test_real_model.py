"""What the page on a real model says of Qwen2.5-VL-3B: tokens and FLOPs by hand, and that it fits its devices."""

import importlib.util
from pathlib import Path

import jax
import pytest

from evals.bench import real_model

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "real-model.md").read_text("utf-8")
GRID, TOKENS = (58, 92), 46 * 29 + 2
"""1280 × 800 pixels are resized to 1288 × 812: 92 × 58 patches of 14 pixels, four of them a token, and two more."""


def test_the_page_has_the_tokens_and_flops_that_are_counted():
    assert real_model.screenshot() == (GRID, TOKENS)
    assert real_model.flops_table() in PAGE
    assert f"{TOKENS} tokens" in PAGE


def test_flops_are_two_for_each_weight_and_token_and_four_for_each_width_and_pair():
    """Biases and norms, which are no matrix products, are 2 ‰ of the weights at most."""
    leaves = jax.tree_util.tree_leaves_with_path(real_model.model()[1].state)
    sizes = {jax.tree_util.keystr(path): leaf.size for path, leaf in leaves}
    decoder = sum(size for name, size in sizes.items() if "decoder" in name and "embed" not in name)
    pairs = TOKENS * (16 + 3 * TOKENS) + TOKENS * (TOKENS + 1) // 2
    session = 2 * decoder * TOKENS + 4 * 36 * 2048 * pairs
    cells = [row.split(" | ") for row in real_model.flops_table().splitlines() if row.startswith("| session")]
    assert float(cells[0][2]) == pytest.approx(session / 1e12, abs=0.06)

    # The merger runs once for four patches; 28 of 32 blocks see windows of 64 patches.
    patches = GRID[0] * GRID[1]
    tower = sum(size for name, size in sizes.items() if "decoder" not in name)
    merger = 5120 * 5120 + 5120 * 2048
    seen = 28 * 64 + 4 * patches
    expected = 2 * patches * (tower - merger + merger / 4 + 2 * 1280 * seen)
    assert real_model.tower_flops() == pytest.approx(expected, rel=2e-3)


@pytest.mark.device
@pytest.mark.parametrize(("device", "needs"), [("H100, 80 GiB", "jax_cuda13_plugin"), ("v5e, 16 GiB", "libtpu")])
def test_a_session_s_programs_fit_their_device(device: str, needs: str):
    if importlib.util.find_spec(needs) is None:
        pytest.skip("no compiler")
    tokens, kind = real_model.screenshot()[1], real_model.DEVICES[device]
    programs = [real_model.tower(), real_model.behind(3 * tokens, tokens), real_model.behind(4 * tokens, 32, True)]
    assert all(real_model.working_bytes(kind, program) < 2 << 30 for program in programs)

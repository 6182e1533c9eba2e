# Two images, a patch, a moved page, an answer. Run from the repository's root.
import tempfile
from pathlib import Path

import jax
import numpy as np
from PIL import Image

import kvpatch_jax as kvp
from evals import small_task
from models import load

backbone = load("evals/trained/qwen2_5_vl", dtype="float32")

# Two images the model never saw: a legend (which glyph has which colours) and a page full of glyphs.
contexts = small_task.sample_contexts(np.random.default_rng(7), 1)
legends, pages = small_task.render(contexts)
folder = Path(tempfile.mkdtemp())
Image.fromarray(legends[0, 0]).save(folder / "legend.png")
Image.fromarray(pages[0]).save(folder / "page.png")

# Each image prefilled alone, its KV kept without its position: the canonicals.
legend = kvp.make_chunk(backbone, [folder / "legend.png"], id="legend")
page = kvp.make_chunk(backbone, [folder / "page.png"], id="page")

# Once, both images in one prompt: what the page becomes behind the legend. The patch is the thin part of the change.
_, conditioned = kvp.conditioned(backbone, [[folder / "legend.png"], [folder / "page.png"]])
patch = kvp.form_patch(page, conditioned, rank=8, antecedent=[legend.id])
print(f"the page: {page.nbytes} bytes of KV; its patch: {patch.nbytes} bytes")

# Later the same two images stand elsewhere. No forward pass: one rotation each, and the patch for the page.
start = 30
legend_kv = kvp.apply_patch(legend, None, start)
page_start = start + legend.span
blind = kvp.apply_patch(page, None, page_start)
patched = kvp.apply_patch(page, patch, page_start, antecedent=[legend.id])


def answer(question: str, page_kv: dict[str, jax.Array]) -> str:
    """Ask over the legend's and the page's KV, as an engine would read them."""
    context = kvp.joined(legend_kv, page_kv)
    tokens = backbone.embed(**backbone.prepare([question])).shift(page_start + page.span)
    return backbone.text(backbone.generate(tokens, steps=1, context=context)[0])


# Which colour does the legend give the glyph in one cell of the page? That needs both images.
questions = small_task.ask(contexts, np.random.default_rng(0), {"chain": 6}, shown=np.array([[True, False, False]]))
words = small_task.VOCABULARY.names
for what, cell, right in zip(questions.ask[0], questions.argument[0], questions.answer[0], strict=True):
    question = f"{words[what]} {words[cell]}"
    print(
        f"{question:>14}  right {words[right]:8} blind {answer(question, blind):8} patched {answer(question, patched)}"
    )

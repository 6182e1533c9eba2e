# Two images, a patch, a moved page, an answer. Needs an editable install of a checkout, and runs from anywhere.
from pathlib import Path

import kvpatch_jax as kvp
from models import load

checkout = Path(kvp.__file__).parents[1]  # has the model and the images
backbone = load(checkout / "evals/trained/qwen2_5_vl", dtype="float32")

# Two images the model never saw: a legend (which glyph has which colours) and a page full of glyphs.
images = checkout / "docs/pictures/screenshots"
legend_image, page_image = images / "1-legend.png", images / "4-page.png"

# Each image prefilled alone, its KV kept without its position: the canonicals.
legend = kvp.make_chunk(backbone, [legend_image], id="legend")
page = kvp.make_chunk(backbone, [page_image], id="page")

# Once, both images in one prompt: what the page becomes behind the legend. The patch is the thin part of the change.
_, conditioned = kvp.conditioned(backbone, [[legend_image], [page_image]])
patch = kvp.form_patch(page, conditioned, rank=8, antecedent=[legend.id])
print(f"the page: {page.nbytes} bytes of KV; its patch: {patch.nbytes} bytes")

# Later the same two images stand elsewhere. No forward pass: one rotation each, and the patch for the page.
start = 30
legend_kv = kvp.apply_patch(kvp.Placed(legend, None, start))
page_start = start + legend.span
blind = kvp.apply_patch(kvp.Placed(page, None, page_start))
patched = kvp.apply_patch(kvp.Placed(page, patch, page_start, antecedent=[legend.id]))


def answer(question: str, page_kv: dict) -> str:
    """Ask over the legend's and the page's KV, as an engine would read them."""
    context = kvp.joined(legend_kv, page_kv)
    tokens = backbone.embed(**backbone.prepare([question])).shift(page_start + page.span)
    return backbone.text(backbone.generate(tokens, steps=1, context=context)[0])


# Which colour does the legend give the glyph in a cell of the page? That needs both images. Six cells, drawn at random.
questions = {
    "stripe? r4t3": "stripe0",
    "stripe? r4t7": "stripe4",
    "fill? r9t4": "fill2",
    "stripe? r1t5": "stripe3",
    "stripe? r7t7": "stripe3",
    "stripe? r6t8": "stripe3",
}
for question, right in questions.items():
    print(f"{question:>14}  right {right:8} blind {answer(question, blind):8} patched {answer(question, patched)}")

# Two images, a patch, a moved bill, an answer. Needs an editable install of a checkout, and runs from anywhere.
from pathlib import Path

import kvpatch_jax as kvp
from kvpatch_jax.models import load

checkout = Path(kvp.__file__).parents[1]  # has the model and the images
backbone = load(checkout / "evals/trained/documents/qwen2_5_vl", dtype="float32")

# Two images the model never saw: a price list and a bill.
images = checkout / "docs/pictures/screenshots"
list_image, bill_image = images / "2-list.png", images / "4-bill.png"

# Each image prefilled alone, its KV kept without its position: the canonicals.
prices = kvp.make_chunk(backbone, [list_image], id="list")
bill = kvp.make_chunk(backbone, [bill_image], id="bill")

# Once, both images in one prompt: what the bill becomes behind the list. The patch is the thin part of the change.
_, conditioned = kvp.conditioned(backbone, [[list_image], [bill_image]])
patch = kvp.form_patch(bill, conditioned, rank=8, antecedent=[prices.id])
print(f"the bill: {bill.nbytes} bytes of KV; its patch: {patch.nbytes} bytes")

# Later the same two images stand elsewhere. No forward pass: one rotation each, and the patch for the bill.
start = 30
list_kv = kvp.apply_patch(prices, None, start)
bill_start = start + prices.span
blind = kvp.apply_patch(bill, None, bill_start)
patched = kvp.apply_patch(bill, patch, bill_start, antecedent=[prices.id])


def answer(question: str, bill_kv: dict) -> str:
    """Ask over the list's and the bill's KV, as an engine would read them."""
    context = kvp.joined(list_kv, bill_kv)
    tokens = backbone.embed(**backbone.prepare([question])).shift(bill_start + bill.span)
    return backbone.text(backbone.generate(tokens, steps=1, context=context)[0])


# What does the list say about the item in a cell of the bill? That needs both images. Five cells.
questions = {
    "unit of D2?": "d",
    "unit of E1?": "pc",
    "unit of D7?": "l",
    "unit of G6?": "g",
    "unit of B4?": "h",
}
for question, right in questions.items():
    print(f"{question:>14}  right {right:4} blind {answer(question, blind):4} patched {answer(question, patched)}")

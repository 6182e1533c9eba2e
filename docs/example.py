"""Two images, a patch, a moved bill, an answer. Needs an editable install."""

from pathlib import Path

import kvpatch_jax as kvp
from kvpatch_jax.models import load

checkout = Path(kvp.__file__).parents[1]  # has the model and the images
backbone = load(checkout / "evals/trained/documents/qwen2_5_vl", dtype="float32")

# Two images that the model was not trained on: a price list and a bill.
images = checkout / "docs/pictures/screenshots"
list_image, bill_image = images / "2-list.png", images / "4-bill.png"

# Prefill each image alone and keep its KV without positions: the canonicals.
prices = kvp.make_chunk(backbone, [list_image], id="list")
bill = kvp.make_chunk(backbone, [bill_image], id="bill")

# Prefill both images together, once. The patch is what the bill absorbed from the list.
_, conditioned = kvp.conditioned(backbone, [[list_image], [bill_image]])
patch = kvp.form_patch(bill, conditioned, rank=8, antecedent=[prices.id])
print(f"the bill: {bill.nbytes} bytes of KV; its patch: {patch.nbytes} bytes")

# Later both images appear at other positions. There is no forward pass over them.
start = 30
list_kv = kvp.apply_patch(prices, None, start)
bill_start = start + prices.span
blind = kvp.apply_patch(bill, None, bill_start)
patched = kvp.apply_patch(bill, patch, bill_start, antecedent=[prices.id])


def answer(question: str, bill_kv: dict) -> str:
    """Ask over the KV of list and bill, as an engine would read them."""
    context = kvp.joined(list_kv, bill_kv)
    tokens = backbone.embed(**backbone.prepare([question]))
    tokens = tokens.shift(bill_start + bill.span)
    return backbone.text(backbone.generate(tokens, steps=1, context=context)[0])


# The bill says which item is in a cell, and the list says how that item is sold.
questions = {
    "unit of D2?": "d",
    "unit of E1?": "pc",
    "unit of D7?": "l",
    "unit of G6?": "g",
    "unit of B4?": "h",
}
for question, right in questions.items():
    answers = answer(question, blind), answer(question, patched)
    print(f"{question:>14}  right {right:4} blind {answers[0]:4} patched {answers[1]}")

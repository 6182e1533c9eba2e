"""Tolerance of a chunk's KV to its antecedents: what differing, missing and moved antecedents cost.

`histories` names what stood in front when the KV was formed, `contexts` draws what is measured, `served` forms the KV
and reads behind it, `suite` measures part by part, `rows` and `bounds` make rows, `document` and `figures`
write the page.
"""

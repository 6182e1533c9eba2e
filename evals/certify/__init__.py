"""`python -m evals.certify`: what each way of reuse loses on a backbone, and bounds that were tried on other items.

`windows` draws what is placed (images of the small task, the user's images, texts), `asking` packs what is asked behind
it, `ways` serves every window in every way, `scores` makes bounds and their coverage, `certifying` puts it together.
"""

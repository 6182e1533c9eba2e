"""Certification: what each mode of reuse loses on a backbone, with bounds that were tested on other windows.

Run by `python -m evals.certify`. `window_sources` provides windows (images of the small task, the user's images, or
texts), `packed_questions` packs what is asked behind them, `serving_modes` serves every window in every mode, `scores`
computes bounds and their coverage, `plans` tests plans by them, and `certification` makes the certificate.
"""

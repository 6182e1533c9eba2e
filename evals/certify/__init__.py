"""Certification: what each mode of reuse loses on a backbone, with bounds that were tested on other windows.

Run by `python -m evals.certify`. `window_sizes` says how many windows of which sizes, and `window_sources` provides
them (images of the small task, the user's images, or texts); `packed_questions` packs what is asked behind them.
`serving_modes` serves every window in every mode, with the stored prefills of `other_histories`. `scores` computes
bounds and their coverage, `plans` and `mixtures` test them where methods are mixed, and `certification` makes the
certificate. `time_estimate` says beforehand how long all of that takes.
"""

"""What a reader of a report must know before its tables: how the weights, the task and the arms came about."""

NOTES = [
    "The task, its sizes and the recipe were designed on other seeds (777 and 9001 among them) and chosen so that "
    "blind reuse has something to lose. The default evaluation seed was first used after these weights were trained. "
    "A second draw of pages was trained afterwards and given up, because its control did not learn within the "
    "recipe's steps. Handwriting is held out too. The other backbones and seeds were trained later by the same recipe, "
    "each once, and nothing was changed after looking at what they do. LLaVA took 2400 steps in place of 1800, and two "
    "earlier forms of it were stopped in training, by their training curves alone.",
    "The smallest rank is judged by chain and aggregate questions, as the rule first read. Rank 4 met it at the first "
    "look at this seed; override questions were then added to it, which made a larger rank of it and turned one "
    "verdict. They are out of it again (evals/rules.json), and are shown.",
    "The default instance is the extreme one of three training seeds: blind reuse takes more chain answers from it "
    "than from either replicate or from the control. The headline is the mean over the three, with their spread.",
    "Only the page is reused, and at the place where its patch was formed; the legends in front are as re-prefill has "
    "them. Rank 64 keeps more numbers than the page has.",
    "Recall's “fresh” and slide's “removal” patches are factors of the very prefill that they are scored against: read "
    "them as oracles. The window's suite has such patches formed of something else.",
    "The task favours a low rank: a page has at most twelve different glyphs, and the mean of Δ over the cells of one "
    "glyph answers nearly everything (class_mean).",
    "Half of the training questions see only the page, as a windowed agent's model is trained; the control was trained "
    "without that. Training also has an auxiliary loss that names, on every page cell, the glyph it shows and the fill "
    "and stripe colour that the legends give it, which is what the page has to absorb; the control has the same loss. "
    "Query projections start as copies of key projections (tied initialisation).",
    "Reorder covers all six orders of the legends, among them the one the transferred patch was formed in. The orbit "
    "patch is the mean over the five orders that are not being tested.",
    "Bytes that lie stored and work while serving are two axes and are never added. CacheBlend's check layer, which "
    "all tokens run through, and the pass that chooses tokens by the question are counted as work.",
]

WINDOW_NOTES = [
    "The window's suite: images of other contexts are those of the next contexts in the batch. Legends that do not "
    "matter define only glyphs that are not on the page. Windows of 8, 16 and 32 images are far from what these models "
    "were trained with (four images): there the reference itself may answer wrongly, and KL and flips against it are "
    "what to read.",
    "The paper's “patch on the fixed earlier context” is read as a patch formed behind those of the old chunks that "
    "still stand in front when the page comes back; where none does, it is blind reuse.",
    "Reorder beyond K = 3 and windows of many images are measured on the first batch of contexts alone.",
]

"""The one task of the evaluation: bills after price lists, charts after keys, screens after settings.

A cell is 28 × 28 pixels, two lines and one token. Its upper line shows one of 72 items (a word; a bar's fill and edge;
an icon). Its lower line shows the item's code, a letter and a digit, on the *page*, and the item's value and unit, of
twelve each, on a *sheet*. Values are drawn for each item by itself, so nothing that a cell shows tells them. Contexts
have 3, 7 or 15 sheets with about as many entries in all, then a page of 64 cells. An item on two sheets has the later
one's value. Every image has one of eight faces in one of six cuts, and paper, ink, place and noise of its own; three
more faces are never drawn in training.

Kinds of questions (`questions.KINDS`), and what an answer needs:
  page        a part of the item in a code's cell, or of the code in an item's: the page
  sheet       value or unit of an item that is not on the page: the sheets
  chain       value or unit of a code's item, as in `unit C6?`: both
  override    the same of an item that two sheets have: both, and the sheets' order
  aggregate   the most frequent value among a letter's cells, as in `most C?`: both, eight cells
  list        the values of four codes' items, all to be right: both, four cells

The trained instances are in `evals/trained`: `documents/qwen2_5_vl` (training seeds 0, 1 and 3), one with as many KV
heads as query heads, a control trained without a sliding window, `documents/kimi_vl` (latent attention, experts), and
`plain/qwen3_vl` and `plain/qwen3_5` (a hybrid) on the plain drawing. Half of the questions about a page see it alone in
training, as after a slide, so that pages learn to absorb what their questions need; in the control none do.

The recipe was chosen by training curves. Seed 2 never learnt to read and was stopped by its curve at step 1 672, before
it was evaluated; seed 3 took its place. `plain/qwen3_5` began with the weights of `plain/qwen3_vl`, because from random
weights no hybrid learnt. Kimi-VL is measured on documents that all look alike, for on others its questions across
images stayed below .45 in three trainings. It was trained with `--backbone=kimi_vl --steps=3000 --reading=600
--plain=100000 --varied=100001 --tiny=1700 --small=500 --proportions=2500 --longer=2700`.
"""

"""The page about `evals.measure` shows the rows that are kept, and the writer those of a run."""

import json

import pytest

from evals.measure import document
from kvpatch_jax.errors import InputError


def test_the_page_shows_the_kept_rows():
    kept = json.loads((document.ROOT / document.KEPT).read_text())
    page = (document.ROOT / document.PAGE).read_text()
    assert sorted(kept) == sorted([*document.MEASURED, document.EPISODES])
    for name, own in kept.items():
        assert f"<!-- {name} -->\n\n{document.section(name, own)}\n\n<!-- /{name} -->" in page


def test_kept_rows_are_those_of_a_run(tmp_path):
    """Two episodes whose means are counted by hand, and the table made of them."""
    lines = []
    for episode, score in (("a", 1.0), ("b", 0.0)):
        for kind in ("near", "gone"):
            for way, right, tokens in (("re-prefill", 1.0, 100), ("session", score, 25)):
                own = {"episode": episode, "step": len(lines) // 2, "kind": kind, "way": way, "score": right}
                lines.append(own | {"kl_first": 0.5, "agrees": right == 1, "tokens": tokens})
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = document.kept_of(document.EPISODES, tmp_path)
    head, table = document.episode_table(kept)
    assert head[3:5] == ["near, 2", "gone, 2"]
    session = dict(zip(head, table[1], strict=True))
    assert session["score"].startswith("0.500 [")
    assert session["less re-prefill's"].startswith("-0.500 [")
    assert (session["tokens a step"], session["% of re-prefill's"]) == ("25", "25.0")
    with pytest.raises(InputError, match="document: got 'else'; expected NAME=FOLDER"):
        document.kept_of("else", tmp_path)

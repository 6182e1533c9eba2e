"""Advice on what to keep: the fewest bytes at a quality, the best quality within bytes, counted by hand."""
# pyright: reportArgumentType=false

import math

import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError
from kvpatch_jax.plan import KeptForm, byte_advice, measured_forms

LAYOUT = kvp.KVLayout.gqa(2, 2, 32, kvp.Rope(1e4, 32))
TOKENS = 96
WHOLE = 2 * 2 * TOKENS * 64 * 2
"""Bytes of k and v of two layers, 64 features each, in 16 bits."""
KV4 = KeptForm("conditioned", "k4v4gall", None, None, 0.0, None, None, 0.9, 0.88, 0.92)
KV6 = KeptForm("conditioned", "k6v6g32", None, None, 0.0, None, None, 0.99, 0.98, 1.0)
ALONE = KeptForm("patched", "k4v4gall", "alone", "int4", 8.0, None, None, 0.95, 0.93, 0.96)
MEAN2 = KeptForm("patched", "k4v4gall", "mean", "int4g32", 4.0, "fisher", 2, 0.97, 0.96, 0.98)
MEAN4 = KeptForm("patched", None, "mean", "int8", 4.0, "fisher", 4, 0.96, 0.95, 0.97)
FORMS = (KV4, KV6, ALONE, MEAN2, MEAN4)


@pytest.fixture
def curves(monkeypatch):
    monkeypatch.setattr(byte_advice, "measured_forms", lambda: FORMS)


def by_hand() -> dict[KeptForm, tuple[int, int]]:
    """Bytes that are kept for each antecedent, and once for all."""
    # 4 bits of 96 × 64 numbers; 4 bytes for each feature of keys, and for each token of values. Two layers.
    gall = 2 * ((96 * 64 // 2 + 4 * 64) + (96 * 64 // 2 + 4 * 96))
    # 6 bits; groups of 32: 3 of tokens for each feature, 2 of features for each token.
    g32 = 2 * ((96 * 48 + 4 * 64 * 3) + (96 * 48 + 4 * 96 * 2))
    # A direction: 96 and 64 numbers of 4 bits, a scale of two bytes for each 32. Two layers, two channels.
    direction = 2 * 2 * (48 + 2 * 3 + 32 + 2 * 2)
    eight = 2 * 2 * (96 + 4 + 64 + 4)
    return {
        KV4: (gall, 0),
        KV6: (g32, 0),
        ALONE: (8 * direction, gall),
        MEAN2: (4 * direction, gall),
        MEAN4: (4 * eight, WHOLE),
    }


def total(form: KeptForm, count: int) -> int:
    each, once = by_hand()[form]
    return each + math.ceil(once / count)


@pytest.mark.usefixtures("curves")
def test_bytes_are_those_counted_by_hand():
    for form, (each, once) in by_hand().items():
        assert form.bytes_each(LAYOUT, TOKENS) == each
        assert form.bytes_once(LAYOUT, TOKENS) == once


@pytest.mark.usefixtures("curves")
@pytest.mark.parametrize(
    ("count", "allowed"), [(1, (KV4, KV6, ALONE)), (2, (KV4, KV6, ALONE, MEAN2)), (3, (KV4, KV6, ALONE, MEAN4))]
)
def test_the_fewest_bytes_at_a_quality_and_the_best_quality_within_bytes(count, allowed):
    for quality in (0.0, 0.9, 0.93, 0.95, 0.96, 0.98):
        enough = [form for form in allowed if form.eta >= quality]
        wanted = min(enough, key=lambda form: total(form, count))
        found = kvp.advise(LAYOUT, TOKENS, count, quality=quality)
        assert (found.form, found.nbytes) == (wanted, total(wanted, count))
        assert found.share == found.nbytes / WHOLE
        assert found.patch_nbytes == (by_hand()[wanted][0] if wanted.kept == "patched" else None)
        others = [form for form in enough if form.kept != wanted.kept]
        assert found.rival == min(others, key=lambda form: total(form, count), default=None)
        assert (wanted.encoding or "16 bits") in str(found)
    for budget in sorted(total(form, count) for form in allowed):
        fitting = [form for form in allowed if total(form, count) <= budget]
        assert kvp.advise(LAYOUT, TOKENS, count, budget=budget).form.eta == max(form.eta for form in fitting)


@pytest.mark.usefixtures("curves")
def test_break_even_is_the_least_count_at_which_patches_win():
    for quality in (0.9, 0.93, 0.97, 0.985):
        wins = None
        for count in range(64, 0, -1):
            mean = {1: (), 2: (MEAN2,)}.get(count, (MEAN4,))
            kept = {"conditioned": math.inf, "patched": math.inf}
            for form in (KV4, KV6, ALONE, *mean):
                if form.eta >= quality:
                    kept[form.kept] = min(kept[form.kept], total(form, count))
            wins = count if kept["patched"] < kept["conditioned"] else wins
        assert kvp.advise(LAYOUT, TOKENS, 1, quality=quality).break_even == wins


@pytest.mark.usefixtures("curves")
def test_what_cannot_be_advised_is_refused(unchecked):
    least = min(total(form, 1) for form in (KV4, KV6, ALONE))
    for arguments, word in (
        ((LAYOUT, 0), "tokens"),
        ((LAYOUT, TOKENS, 0), "antecedents"),
        ((LAYOUT, TOKENS, 1.5), "antecedents"),
        (("layout", TOKENS), "backbone"),
    ):
        with pytest.raises(InputError, match=word):
            kvp.advise(*arguments)
    assert kvp.advise(LAYOUT, TOKENS, forms=[KV6]).form == KV6
    for options, word in (
        ({"quality": 0.99, "forms": [KV4]}, "at most 0.900"),
        ({"forms": []}, "got 0 forms"),
        ({"budget": 1 << 40, "forms": []}, "got 0 forms"),
        ({"forms": [MEAN2, MEAN4]}, "none of them for 1 antecedents"),  # a mean of one is the KV itself
        ({"quality": 0.999}, "highest measured"),
        ({"quality": 2}, "0 to 1"),
        ({"quality": 0.9, "budget": 10}, "one of them"),
        ({"budget": least - 1}, f"at least {least}"),
        ({"budget": "much"}, "budget"),
    ):
        with pytest.raises(InputError, match=word):
            kvp.advise(LAYOUT, TOKENS, **options)


def test_the_shipped_curves_say_what_the_guide_says():
    """One antecedent: the conditioned KV in few bits. From two on: a base and patches."""
    layout = kvp.KVLayout.gqa(28, 4, 128, kvp.Rope(1e6, 128))
    assert len(measured_forms()) > 20
    alone = kvp.advise(layout, 1024)
    assert alone.form.kept == "conditioned"
    assert alone.break_even == 2
    shares = [kvp.advise(layout, 1024, count).share for count in (1, 2, 4, 16)]
    assert shares == sorted(shares, reverse=True)
    assert kvp.advise(layout, 1024, 2).form.kept == "patched"

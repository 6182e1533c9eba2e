"""Canonical text, segmentation, signatures and eviction, against slow Python."""

import itertools

import numpy as np
import pytest

from kvpatch_jax.errors import ConfigError, InputError, MissingExtraError
from kvpatch_jax.segment_reuse import (
    CanonicalRules,
    Segmentation,
    SegmentedLRU,
    SegmentPrompt,
    SignatureMaker,
    TokenRange,
    as_ids,
    canonical_units,
    canonicalise,
    jaccard,
    pack,
    segments,
    shingles,
    spans,
    unpack,
    windows,
)
from kvpatch_jax.utils import optional_packages
from tests.kvpatch_jax.segment_reuse.segment_cases import encode, id_prompt, prompt, words


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("At 2026-01-02T10:00:00Z we saw it", "at 2025-11-30 23:59:59 we  SAW it"),
        ("request 123456 done", "request 9876543210 done"),
        ("trace deadbeef01 ended", "trace 00ff00ff99 ended"),
        ("id 123e4567-e89b-12d3-a456-426614174000.", "id 00000000-0000-0000-0000-000000000001."),
        ("“quoted” – it’s", '"quoted" - it\'s'),
    ],
)
def test_texts_that_differ_in_volatile_spans_case_and_marks_are_one_canonical_text(first, second):
    assert canonicalise(first) == canonicalise(second)


def test_content_survives_canonicalisation():
    assert canonicalise("2 results") != canonicalise("3 results")
    # Strings and code keep their case; what surrounds them does not.
    assert canonicalise('Call {"Name": `Foo`}') == 'call {"Name": `Foo`}'
    text = 'Observation: 2026-01-02 “A  b” id 99999\n{"Name": "X"}'
    assert canonicalise(canonicalise(text)) == canonicalise(text)
    assert canonical_units("Is <id> 123456 here?") == ["is", "<id>", "<id>", "here", "?"]


def test_canonical_text_changes_no_token_that_is_executed():
    text = "Observation: 2026-01-02 Found 123456 THINGS"
    assert SegmentPrompt.of_text(text, encode).ids.tolist() == encode(text).ids


def test_spans_tile_a_prompt_and_begin_at_its_anchors():
    text = f"{words(0, 20)}\nThought: {words(1, 9)}\nAction: {words(2, 5)}\nObservation: {words(3, 700)}"
    found = spans(prompt(text), Segmentation())
    assert found[0].start == 0
    assert found[-1].stop == len(prompt(text).ids)
    assert all(before.stop == after.start for before, after in itertools.pairwise(found))
    assert max(span.length for span in found) <= 256
    texts = [prompt(text).characters(*span) for span in found]
    assert "".join(texts) == text
    assert [line.split(":")[0] for line in texts[1:4]] == ["Thought", "Action", "Observation"]


def test_token_patterns_are_anchors_without_text():
    rng = np.random.default_rng(0)
    for _ in range(50):
        ids = rng.integers(0, 4, 60)
        found = {span.start for span in spans(id_prompt(ids), Segmentation((), ((1, 2),), longest=64))}
        assert found == {0} | {at for at in range(59) if ids[at] == 1 and ids[at + 1] == 2}


def test_windows_cover_a_span_and_are_counted_from_its_start():
    how = Segmentation(window=64, stride=32)
    for start in (0, 7, 100):
        for length in (8, 64, 65, 96, 97, 200, 256):
            span, covered = TokenRange(start, start + length), set()
            found = windows(span, how)
            for window in found:
                assert window.length == 64
                covered.update(range(*window))
            assert covered == (set(range(*span)) if length > 64 else set())
            # A moved span has the same windows, moved.
            assert [window.start - start for window in found] == [w.start for w in windows(TokenRange(0, length), how)]
    assert segments(TokenRange(0, 5), how) == []


@pytest.mark.parametrize("permutations", [128, 256])
def test_minhash_estimates_jaccard_within_its_standard_error(permutations):
    maker, rng, errors = SignatureMaker(6, permutations, 1), np.random.default_rng(0), []
    for number in range(60):
        first = words(number, 120).split()
        second = list(first)
        for place in rng.choice(120, rng.integers(0, 12), replace=False):
            second[place] = "other"
        a = {tuple(first[at : at + 6]) for at in range(115)}
        b = {tuple(second[at : at + 6]) for at in range(115)}
        exact = len(a & b) / len(a | b)
        assert {tuple(one.decode().split("\x1f")) for one in shingles(first, 6)} == a
        estimate = jaccard(maker.minhash(first).digest(), maker.minhash(second).digest())
        error = (estimate - exact) / max((exact * (1 - exact) / permutations) ** 0.5, 1e-9)
        if exact == 1.0:
            assert estimate == 1.0
        else:
            errors.append(error)
            assert abs(error) < 4.5
    assert abs(np.mean(errors)) < 4 / len(errors) ** 0.5


def test_short_and_empty_sequences_have_one_shingle():
    assert shingles([], 6) == {b""}
    assert shingles(["a", "b"], 6) == {b"a\x1fb"}


class SlowSLRU:
    """Two lists of (key, size), least recent first."""

    def __init__(self, budget, share):
        self.budget, self.protected_budget = budget, int(budget * share)
        self.probation, self.protected = [], []

    def admit(self, key, size):
        if size > self.budget or key in dict(self.probation + self.protected):
            return None
        self.probation = [*self.probation, (key, size)]
        evicted = []
        while sum(size for _, size in self.probation + self.protected) > self.budget:
            if len(self.probation) > 1:
                evicted.append(self.probation[0][0])
                self.probation = self.probation[1:]
            else:
                evicted.append(self.protected[0][0])
                self.protected = self.protected[1:]
        return evicted

    def hit(self, key):
        entries = [entry for entry in self.probation + self.protected if entry[0] == key]
        self.probation = [entry for entry in self.probation if entry[0] != key]
        self.protected = [entry for entry in self.protected if entry[0] != key] + entries
        while entries and self.protected and sum(size for _, size in self.protected) > self.protected_budget:
            self.probation = [*self.probation, self.protected[0]]
            self.protected = self.protected[1:]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.8, 1.0])
def test_slru_evicts_what_a_slow_model_evicts(share):
    rng = np.random.default_rng(int(10 * share))
    for _ in range(40):
        fast, slow = SegmentedLRU(100, share), SlowSLRU(100, share)
        for _ in range(80):
            key = int(rng.integers(0, 15))
            if rng.random() < 0.5:
                size = int(rng.integers(1, 120))
                assert fast.admit(key, size) == slow.admit(key, size)
            else:
                fast.hit(key)
                slow.hit(key)
            assert fast.keys == ([k for k, _ in slow.probation], [k for k, _ in slow.protected])
            assert fast.bytes <= 100


def test_stored_kv_keeps_its_precision_and_erases_all():
    rng = np.random.default_rng(0)
    kv = {"k": rng.normal(size=(3, 10, 2, 4)).astype(np.float32), "v": np.zeros((3, 10, 2, 4), np.float32)}
    kv["k"][0, :, 0, 0] *= 100  # one channel alone is large, and has a scale of its own
    residual = rng.normal(size=(10, 8)).astype(np.float32)

    exact, entering = unpack(pack(kv, residual, "float32"), 2, 7)
    assert exact["k"].tobytes() == kv["k"][:, 2:7].tobytes()
    assert entering.tobytes() == residual[2:7].tobytes()

    rounded = pack(kv, residual, "int8")
    largest = np.abs(kv["k"]).max(1, keepdims=True)
    assert (np.abs(unpack(rounded, 0, 10)[0]["k"] - kv["k"]) <= largest / 254 * 1.001).all()
    assert not unpack(rounded, 0, 10)[0]["v"].any()
    narrow = pack(kv, residual, "bfloat16")
    assert (np.abs(unpack(narrow, 0, 10)[0]["k"] - kv["k"]) <= np.abs(kv["k"]) / 256).all()
    assert rounded.bytes < narrow.bytes < pack(kv, residual, "float32").bytes

    rounded.erase()
    assert not any(array.any() for array in rounded.arrays)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Segmentation(anchors=("(",)),
        lambda: Segmentation(token_anchors=((),)),
        lambda: Segmentation(window=0),
        lambda: Segmentation(window=64, stride=65),
        lambda: Segmentation(longest=32),
        lambda: CanonicalRules(volatile=(("[", "x"),)),
        lambda: SegmentedLRU(0),
        lambda: SegmentedLRU(10, 1.1),
    ],
)
def test_invalid_options_raise_a_typed_error(make, unchecked):
    with pytest.raises(ConfigError, match="expected"):
        make()


@pytest.mark.parametrize("ids", [[], [[1, 2]], [0.5]])
def test_invalid_ids_raise_a_typed_error(ids, unchecked):
    with pytest.raises(InputError, match="expected integers"):
        as_ids(ids)


def test_a_missing_datasketch_names_the_extra(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(optional_packages.importlib, "import_module", missing)
    with pytest.raises(MissingExtraError, match=r"kvpatch_jax\[segments\]"):
        SignatureMaker(6, 128, 1)

"""Tokens are drawn with the shares that float64 gives, the same in blocks or streams, up to the stop token."""

import functools
import json
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch_jax.answers import Draws
from kvpatch_jax.backbone import joined_tokens
from kvpatch_jax.errors import ConfigError, NotFiniteError
from kvpatch_jax.models import Sampling, TextPiece, load, pad_rows
from kvpatch_jax.models.decoder import stacks
from kvpatch_jax.models.decoding import BLOCK, TextPieces
from kvpatch_jax.models.decoding.sampling import REFUSED, choose, choose_rows, draw_of, kept
from kvpatch_jax.models.inputs.stops import read_answer_tokens, read_stop_tokens, save_generation
from tests.goldens.load import write_checkpoint
from tests.goldens.table import FAMILIES
from tests.shared.arrays import placed
from tests.shared.compilations import compilations
from tests.shared.tolerances import assert_close_to_largest
from tests.shared.window_oracle import BUCKETS

pytestmark = pytest.mark.usefixtures("highest_precision")

T, STEPS = 8, BLOCK + 9
IDS = np.random.default_rng(3).integers(3, 290, (2, T))
WARM = {"sampling": Sampling(0.9, 0.95), "key": 11}
UNEQUAL = ("llama2", "deepseek_v3", "qwen3_vl", "gemma3_text", "qwen3_5", "qwen2_5_vl", "llava_next", "kimi_vl")
UNEQUAL += ("gemma4",)


@pytest.fixture(scope="module")
def backbone(tiny):
    return tiny("qwen3_window").with_buckets(BUCKETS.of_keys)


@pytest.fixture(scope="module")
def tokens(backbone):
    return backbone.embed(IDS)


@pytest.fixture(scope="module")
def answers(backbone, tokens):
    return backbone.generate(tokens, STEPS, stop=(), **WARM)


def test_a_stream_makes_the_tokens_of_generate(backbone, tokens, answers):
    """Whatever the block of tokens per program, and without compiling anything for another way of drawing."""
    with compilations() as streamed:
        pieces = list(backbone.stream(tokens, STEPS, stop=(), **WARM))
    assert not streamed
    assert all(isinstance(piece, TextPiece) and piece.texts == () and piece.text == "" for piece in pieces)
    assert np.array_equal(np.stack([piece.ids for piece in pieces], axis=1), answers)
    moved, key = tokens.shift(1000), jax.random.key(5)
    with compilations() as compiled:
        fewer = backbone.generate(tokens, 12, stop=(), **WARM)
        other = backbone.generate(tokens, STEPS, stop=(), **WARM | {"key": 12})
        for sampling in (None, Sampling(0.3), Sampling(1.0, 0.5, 4)):
            backbone.generate(moved, STEPS - 4, sampling=sampling, key=key, stop=(7, 8, 9))
    assert not compiled
    assert np.array_equal(fewer, answers[:, :12])  # fewer steps, one key
    assert not np.array_equal(other, answers)


def test_greedy_tokens_are_those_of_one_prefill(backbone, tokens):
    """Of prompt and answer together, in layers that slide among layers that do not."""
    greedy = backbone.generate(tokens, STEPS, stop=())
    plain, ids = backbone.with_buckets(None), np.concatenate([IDS, greedy[:, :-1]], axis=1)
    out = plain.prefill(plain.embed(ids), logits="all")
    assert np.array_equal(np.argmax(out.logits, axis=-1)[:, T - 1 :], greedy)


def test_prompts_whose_logits_are_no_numbers_are_refused(backbone, tokens):
    spoilt = np.array(tokens.embeddings)
    spoilt[1, 2] = np.nan
    with pytest.raises(NotFiniteError, match=r"row 1: got logits of token 0 .*expected"):
        backbone.generate(tokens._replace(embeddings=placed(spoilt)), STEPS, stop=())


def test_rows_end_at_stop_tokens(backbone, tokens, answers, monkeypatch):
    first = int(answers[0, 4])
    second = next(int(token) for token in answers[1] if token not in answers[0])  # the second row's alone
    stopped = backbone.generate(tokens, STEPS, stop=(first, second), **WARM)
    ends = [min(row.index(token) for token in (first, second) if token in row) for row in answers.tolist()]
    assert stopped.shape[1] == max(ends) + 1
    for row, end in zip(range(2), ends, strict=True):
        assert np.array_equal(stopped[row, : end + 1], answers[row, : end + 1])
        assert (stopped[row, end:] == answers[row, end]).all()
    streamed = list(backbone.stream(tokens, STEPS, stop=(first, second), **WARM))
    assert np.array_equal(np.stack([piece.ids for piece in streamed], axis=1), stopped)

    both = sorted({int(token) for token in answers[:, 0]})
    assert backbone.generate(tokens, STEPS, stop=both, **WARM).shape == (2, 1)
    monkeypatch.setattr(backbone, "stop_tokens", tuple(both))  # what a call does not say is the checkpoint's
    assert backbone.generate(tokens, STEPS, **WARM).shape == (2, 1)


@pytest.mark.parametrize(
    "family", ["qwen3_window", *(pytest.param(name, marks=pytest.mark.nightly) for name in UNEQUAL)]
)
def test_rows_of_unequal_lengths_answer_as_alone(golden, family):
    """Padded rows in one batch, and a prompt in parts: the tokens of transformers."""
    prompts = [golden(family, case) for case in FAMILIES[family].cases if case in ("text", "one_image")]
    backbone, steps = prompts[0].backbone.with_buckets(BUCKETS.of_keys), 3
    expected = [prompt.arrays["generated"][:steps].tolist() for prompt in prompts]
    tokens = [prompt.tokens for prompt in prompts]
    short = tokens[0].take(0, tokens[0].embeddings.shape[1] - 4)
    rows, lengths = pad_rows([*tokens, short])
    generated = np.asarray(backbone.generate(rows, steps, lengths=lengths, stop=()))
    counts = [len(answer) for answer in expected]
    assert [row[:count].tolist() for row, count in zip(generated, counts, strict=False)] == expected
    # As many rows, which are the same prompt, run the same program.
    alone = lambda prompt: jax.tree.map(lambda leaf: np.repeat(leaf, len(lengths), axis=0), prompt.on_host())
    assert np.array_equal(generated[-1], backbone.generate(alone(short), steps, stop=())[0])

    joined = joined_tokens([tokens[0].take(0, 4), tokens[0].take(4, tokens[0].embeddings.shape[1])])
    assert backbone.generate(alone(joined), steps, stop=())[0, : counts[0]].tolist() == expected[0]


@pytest.mark.parametrize("family", ["llama2", pytest.param("deepseek_v3", marks=pytest.mark.nightly)])
def test_kernels_read_in_their_stacks_give_what_scanned_ones_do(family, golden, tmp_path, monkeypatch):
    """As forwards of few tokens on a CPU read them, in blocks of some rows: the logits of transformers."""
    _, arrays, _, tokens = golden(family, "text")
    monkeypatch.setattr(stacks, "KERNEL_BYTES", 0)
    monkeypatch.setattr(stacks, "BLOCK_BYTES", 2**10)
    logits = load(write_checkpoint(family, tmp_path), angles="float32").prefill(tokens, logits="all").logits
    assert_close_to_largest(np.asarray(logits)[0, arrays["rows"]], arrays["logits"], bar=2e-5)


# ------------------------------------------------------------------------------------------------------- text


@functools.cache
def byte_tokenizer(fallback: bool):
    """256 tokens, one per byte: byte-level BPE, or a unigram's byte fall-back."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    if fallback:
        tokenizer = tokenizers.Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, []))
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        return tokenizer
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tokenizer


@given(text=st.text(max_size=12), fallback=st.booleans(), data=st.binary(max_size=12))
def test_pieces_of_text_split_no_character(text, fallback, data):
    """Bytes that are no text come out as the tokenizer has them."""
    tokenizer = byte_tokenizer(fallback)
    pieces = TextPieces(tokenizer)
    parts = [pieces.push(token) for token in (text.encode() if fallback else tokenizer.encode(text).ids)]
    assert "".join(parts) + pieces.rest() == text
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text
    lengths = np.cumsum([len(character.encode()) for character in text]).tolist()
    assert {place for place, part in enumerate(parts, 1) if part} <= set(lengths)
    if not fallback:
        pieces = TextPieces(tokenizer)
        decoded = "".join(pieces.push(token) for token in data) + pieces.rest()
        assert decoded == tokenizer.decode(list(data), skip_special_tokens=False)


def test_a_stream_has_text_and_leaves_out_stop_tokens(backbone, tokens, answers, monkeypatch):
    monkeypatch.setattr(backbone, "tokenizer", byte_tokenizer(fallback=False))
    end = int(answers[0, 6])
    last = answers[0].tolist().index(end)
    pieces = list(backbone.stream(tokens, STEPS, stop=(end,), **WARM))
    assert "".join(piece.text for piece in pieces) == backbone.tokenizer.decode(answers[0, :last].tolist())
    row = answers[1].tolist()
    stop = row.index(end) if end in row else STEPS
    assert "".join(piece.texts[1] for piece in pieces) == backbone.tokenizer.decode(row[:stop])


def test_stop_tokens_and_lengths_are_read_where_transformers_reads_them_and_saved(tmp_path):
    tokenizer = byte_tokenizer(fallback=False)
    write = lambda name, **table: (tmp_path / name).write_text(json.dumps(table))
    assert (read_stop_tokens(tmp_path, tokenizer), read_answer_tokens(tmp_path)) == ((), None)
    write("tokenizer_config.json", eos_token={"content": "a"})
    assert read_stop_tokens(tmp_path, tokenizer) == (tokenizer.token_to_id("a"),)
    assert read_stop_tokens(tmp_path, None) == ()
    for name, table, stops in (
        ("config.json", {"text_config": {"eos_token_id": 3}}, (3,)),
        ("config.json", {"eos_token_id": 4, "text_config": {"eos_token_id": 3}}, (4,)),
        ("generation_config.json", {"eos_token_id": [5, 6], "max_new_tokens": 7}, (5, 6)),
    ):
        write(name, **table)
        assert read_stop_tokens(tmp_path, tokenizer) == stops
        assert read_answer_tokens(tmp_path) == table.get("max_new_tokens")
    write("generation_config.json", eos_token_id=[5, -1], max_new_tokens=0)
    with pytest.raises(ConfigError, match=r"eos_token_id .*expected"):
        read_stop_tokens(tmp_path, tokenizer)
    with pytest.raises(ConfigError, match=r"max_new_tokens .*expected a number of tokens"):
        read_answer_tokens(tmp_path)
    for stop, count in (((5, 6), 7), ((), 7), ((5,), None)):
        saved = tmp_path / f"saved {count} {stop}"
        saved.mkdir()
        save_generation(saved, stop, count)
        assert (read_stop_tokens(saved, None), read_answer_tokens(saved)) == (stop, count)


# ---------------------------------------------------------------------------------------------------------------- draws


V, ROWS = 12, 5
GREEDY = Sampling()
CHOOSE: Any = jax.jit(choose)
KEPT: Any = jax.jit(kept)


def chosen(logits, sampling=GREEDY, key: Any = 0, index=0):
    """Of at most `ROWS` rows of at most `V` logits, in one shape, so that there is one program."""
    padded = np.full((ROWS, V), -np.inf, np.float32)
    padded[: len(logits), : logits.shape[1]] = logits
    return np.asarray(CHOOSE(padded, draw_of(sampling, key, ()), index))[: len(logits)]


def shares(logits, sampling: Sampling) -> np.ndarray:
    """What a draw's probabilities should be: by sorting, in float64, ties kept."""
    scaled = np.asarray(logits, np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    if sampling.top_k is not None:
        weights[weights < np.sort(weights)[::-1][: sampling.top_k][-1]] = 0
    if sampling.top_p < 1:
        order = np.sort(weights)[::-1]
        enough = int(np.argmax(np.cumsum(order) >= sampling.top_p * weights.sum() * (1 - 1e-12)))
        weights[weights < order[enough]] = 0
    return weights / weights.sum()


@given(
    logits=st.lists(st.integers(-12, 12), min_size=V, max_size=V),
    top_p=st.sampled_from([1e-6, 0.1, 0.33, 0.5, 0.9, 0.99, 1.0]),
    top_k=st.sampled_from([None, 1, 2, 5, V, 100]),
    temperature=st.sampled_from([0.37, 1.0, 5.0]),
)
def test_the_tokens_of_a_draw_are_those_of_sorting(logits, top_p, top_k, temperature):
    sampling = Sampling(temperature, top_p, top_k)
    scaled = np.asarray(logits, np.float32) / np.float32(temperature)
    draw = draw_of(sampling, 0, ())
    among = np.asarray(KEPT((scaled - scaled.max())[None], draw.top_p, draw.top_k))[0]
    expected = shares(np.asarray(logits), sampling) > 0
    mass = np.exp(np.sort(scaled.astype(np.float64))[::-1] - scaled.max())
    mass = np.cumsum(mass[: top_k or V]) / mass[: top_k or V].sum()
    if np.abs(mass - top_p).min() > 1e-6 or top_p == 1:  # float32 cannot tell a share that is reached exactly
        assert among.tolist() == expected.tolist()


def test_draws_have_the_shares_of_the_distribution():
    """Of one answer, and of a row among others that draw otherwise."""
    logits = np.array([1.0, 0.2, -1.0, 2.0, -np.inf, 0.2], np.float32)
    alone, pair = jax.device_put((logits[None], np.stack([logits, logits])))
    count = 20_000
    many = jax.jit(jax.vmap(lambda draw, index: choose(alone, draw, index)[0], (None, 0)))
    beside = jax.jit(jax.vmap(lambda draws, index: choose_rows(pair, draws, index)[1], (None, 0)))
    for sampling in (Sampling(1.0), Sampling(0.5), Sampling(2.0, 0.8), Sampling(1.0, 1.0, 3)):
        expected, draw = shares(logits, sampling), draw_of(sampling, 7, ())
        other = draw_of(Sampling(3.0, 0.5), 5, ())
        both = [(row.temperature, row.top_p, row.top_k, jax.random.key_data(row.key)) for row in (other, draw)]
        draws = Draws._make(np.stack(column) for column in zip(*both, strict=True))
        index = np.arange(count, dtype=np.int32)
        for drawn in (many(draw, index), beside(draws, np.stack([index, index], 1))):
            share = np.bincount(np.asarray(drawn), minlength=len(logits)) / count
            assert (share[expected == 0] == 0).all()
            assert (np.abs(share - expected) <= 4.5 * np.sqrt(expected * (1 - expected) / count)).all()
        # A row in company draws what it draws alone.
        assert np.array_equal(many(draw, index), beside(draws, np.stack([index, index], 1)))


def test_ties_stay_and_the_least_settings_are_greedy():
    logits = np.array([[0.0, 3.0, 3.0, -np.inf], [5.0, -1.0, 2.0, 4.9]], np.float32)
    assert chosen(logits).tolist() == [1, 0]  # greedy: the first of ties
    for sampling in (Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-9), Sampling(1e-6), Sampling(1e-38)):
        drawn = np.stack([chosen(logits, sampling, index=index) for index in range(20)])
        assert set(drawn[:, 1]) == {0}
        assert set(drawn[:, 0]) <= {1, 2}
        assert sampling.temperature == 1e-38 or set(drawn[:, 0]) == {1, 2}  # ties stay, below float32 greedy decides


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_say_nothing_are_refused(temperature):
    logits = np.zeros((ROWS, V), np.float32)
    logits[0, 3], logits[1, 3], logits[2] = np.nan, np.inf, -np.inf
    logits[3, 1:] = -np.inf  # one token alone is a choice
    ids = chosen(logits, Sampling(temperature))
    assert ids[:3].tolist() == [REFUSED] * 3
    assert ids[3] == 0
    assert 0 <= ids[4] < V


def test_rows_and_keys_draw_apart():
    rows = np.random.default_rng(0).standard_normal((1, V)).astype(np.float32).repeat(3, axis=0)
    drawn = np.stack([chosen(rows, Sampling(1.5), key, index) for key in (0, jax.random.key(1)) for index in range(20)])
    assert (drawn[:, 0] != drawn[:, 1]).any()
    assert (drawn[:20] != drawn[20:]).any()


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_sampling_is_refused():
    wrongs: Any = ((-1.0,), (np.nan,), (1.0, 0.0), (1.0, 1.5), (1, 1, 0), ("1",))
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="expected"):
            Sampling(*wrong)

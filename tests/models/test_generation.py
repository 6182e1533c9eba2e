"""Continuing prompts: blocks, streams, stop tokens, unequal lengths; what a step copies; text by characters."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.bench.shapes import LARGE
from kvpatch_jax.errors import ConfigError, InputError, NotFiniteError, ShapeError
from kvpatch_jax.models import Sampling, TextPiece, load, pad_rows
from kvpatch_jax.models.decoder import stacks
from kvpatch_jax.models.decoding import BLOCK, TextPieces
from kvpatch_jax.models.inputs.stops import read_answer_tokens, read_stop_tokens, save_generation
from kvpatch_jax.models.random_weights import random_backbone
from tests.goldens.load import write_checkpoint
from tests.shared.compilations import compilations

T, STEPS = 8, BLOCK + 9
WARM = {"sampling": Sampling(0.9, 0.95), "key": 11}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """Grouped-query attention, three layers."""
    return load(write_checkpoint("qwen3", tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def tokens(backbone):
    return backbone.embed(np.random.default_rng(3).integers(3, 290, (2, T)))


@pytest.fixture(scope="module")
def drawn(backbone, tokens):
    return backbone.generate(tokens, STEPS, stop=(), **WARM)


@pytest.mark.nightly
def test_a_stream_makes_the_tokens_of_generate(backbone, tokens, drawn):
    """Whatever the block of tokens per program, and without compiling anything for another way of drawing."""
    with compilations() as streamed:
        pieces = list(backbone.stream(tokens, STEPS, stop=(), **WARM))
    assert not streamed
    assert all(isinstance(piece, TextPiece) and piece.texts == () and piece.text == "" for piece in pieces)
    assert np.array_equal(np.stack([piece.ids for piece in pieces], axis=1), drawn)
    moved, key = tokens.shift(1000), jax.random.key(5)
    with compilations() as compiled:
        fewer = backbone.generate(tokens, 12, stop=(), **WARM)
        other = backbone.generate(tokens, STEPS, stop=(), **WARM | {"key": 12})
        for sampling in (None, Sampling(0.3), Sampling(1.0, 0.5, 4)):
            backbone.generate(moved, STEPS - 4, sampling=sampling, key=key, stop=(7, 8, 9))
    assert not compiled
    assert np.array_equal(fewer, drawn[:, :12])  # fewer steps, one key
    assert not np.array_equal(other, drawn)


def test_rows_end_at_stop_tokens(backbone, tokens, drawn):
    first = int(drawn[0, 4])
    place = drawn[0].tolist().index(first)
    own = next(int(token) for token in drawn[1] if token not in drawn[0])  # the second row's alone
    other = drawn[1].tolist().index(own)
    found = backbone.generate(tokens, STEPS, stop=(first, own), **WARM)
    ends = [min(row.index(token) for token in (first, own) if token in row) for row in drawn.tolist()]
    assert found.shape[1] == max(ends) + 1 <= max(place, other) + 1
    for row, end in zip(range(2), ends, strict=True):
        assert np.array_equal(found[row, : end + 1], drawn[row, : end + 1])
        assert (found[row, end:] == drawn[row, end]).all()
    streamed = list(backbone.stream(tokens, STEPS, stop=(first, own), **WARM))
    assert np.array_equal(np.stack([piece.ids for piece in streamed], axis=1), found)

    both = sorted({int(token) for token in drawn[:, 0]})
    assert backbone.generate(tokens, STEPS, stop=both, **WARM).shape == (2, 1)
    before = backbone.stop_tokens
    backbone.stop_tokens = tuple(both)  # what a call does not say is the checkpoint's
    assert backbone.generate(tokens, STEPS, **WARM).shape == (2, 1)
    backbone.stop_tokens = before


def test_a_closed_stream_runs_nothing_more(backbone, tokens, monkeypatch):
    calls, advance = [], backbone.programs.advance
    monkeypatch.setattr(backbone.programs, "advance", lambda *args: calls.append(1) or advance(*args))
    stream = backbone.stream(tokens, STEPS, stop=())
    assert not calls
    next(stream)
    next(stream)
    asked = len(calls)
    assert asked == 2  # one is under way
    stream.close()
    with pytest.raises(StopIteration):
        next(stream)
    assert len(calls) == asked


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_continued_is_refused(backbone, tokens):
    with pytest.raises(NotFiniteError, match=r"row 1: got logits of token 0 .*expected"):
        backbone.generate(tokens._replace(embeddings=tokens.embeddings.at[1, 2].set(jnp.nan)), STEPS, stop=())
    for options, error in (
        ({"steps": -1}, InputError),
        ({"stop": (300,)}, InputError),
        ({"lengths": [5]}, ShapeError),
        ({"lengths": [5, T + 1]}, ShapeError),
        ({"sampling": Sampling(0.5)}, InputError),
    ):
        for call in (backbone.generate, backbone.stream):  # a stream too is refused before its first token
            with pytest.raises(error, match="expected"):
                call(tokens, **{"steps": 3, **options})
    with pytest.raises(InputError, match="no prompts; expected"):
        pad_rows([])
    with pytest.raises(ShapeError, match="expected"):
        pad_rows([tokens, tokens._replace(embeddings=tokens.embeddings[..., :3])])
    assert backbone.generate(tokens, 0).shape == (2, 0)
    for empty in (tokens.take(0, 0), tokens._replace(embeddings=tokens.embeddings[:0], positions=tokens.positions[:0])):
        for call in (backbone.prefill, lambda none: backbone.generate(none, 3), lambda none: backbone.stream(none, 3)):
            with pytest.raises(ShapeError, match="expected at least one row and one token"):
                call(empty)
    with pytest.raises(ShapeError, match=r"token ids \(0, 4\); expected at least one row"):
        backbone.embed(np.zeros((0, 4), np.int32))


@pytest.mark.parametrize("family", ["llama2", "deepseek_v3"])
def test_kernels_read_in_their_stacks_give_what_scanned_ones_do(family, tmp_path, monkeypatch):
    """As steps of few tokens on a CPU read them, in blocks of some rows."""
    path = write_checkpoint(family, tmp_path)
    made = []
    for tokens_of_a_step in (0, 16):
        monkeypatch.setattr(stacks, "STEP_TOKENS", tokens_of_a_step)
        monkeypatch.setattr(stacks, "KERNEL_BYTES", 0)
        monkeypatch.setattr(stacks, "BLOCK_BYTES", 2**10)
        backbone = load(path)
        tokens = backbone.embed(np.arange(3, 3 + 2 * T).reshape(2, T))
        made.append([backbone.generate(tokens, STEPS, stop=(), **options) for options in ({}, WARM)])
    for scanned, inside in zip(*made, strict=True):
        assert np.array_equal(scanned, inside)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_on_a_cpu_copies_no_weights(dtype):
    """Its temporaries are far below the weights."""
    sizes = {"hidden_size": 512, "intermediate_size": 5632, "num_attention_heads": 8, "num_hidden_layers": 4}
    backbone = random_backbone({**LARGE, **sizes, "vocab_size": 4096})
    backbone = backbone.replaced(jax.tree.map(lambda leaf: leaf.astype(dtype), backbone.parameters))
    programs, one = backbone.programs, backbone.embed(np.array([[5]]), np.array([[20]]))
    cache = {name: jnp.zeros((4, 1, 64, 2, 64), dtype) for name in "kv"}
    arrays = one, cache, None, np.array([[20]]), None, None, None, None
    step = programs.recompute.lower(programs.state, *arrays).compile()
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(programs.state))
    assert step.memory_analysis().temp_size_in_bytes < 0.02 * weights


# ------------------------------------------------------------------------------------------------------- text


@functools.cache
def byte_tokenizer(fallback: bool):
    """256 tokens, one per byte: byte-level BPE, or a unigram's byte fall-back."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    if fallback:
        made = tokenizers.Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, []))
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        return made
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made


@given(text=st.text(max_size=12), fallback=st.booleans())
def test_pieces_of_text_split_no_character(text, fallback):
    tokenizer = byte_tokenizer(fallback)
    ids = list(text.encode()) if fallback else tokenizer.encode(text).ids
    pieces = TextPieces(tokenizer)
    told = [pieces.push(token) for token in ids]
    assert "".join(told) + pieces.rest() == text
    assert all("\ufffd" not in piece for piece in told) or "\ufffd" in text
    lengths = np.cumsum([len(character.encode()) for character in text]).tolist()
    complete = [place for place, piece in enumerate(told, 1) if piece]
    assert set(complete) <= set(lengths)


@given(data=st.binary(max_size=12))
def test_bytes_that_are_no_text_come_out_as_the_tokenizer_has_them(data):
    tokenizer = byte_tokenizer(fallback=False)
    assert tokenizer.get_vocab_size() == 256
    pieces = TextPieces(tokenizer)
    told = "".join(pieces.push(token) for token in data) + pieces.rest()
    assert told == tokenizer.decode(list(data), skip_special_tokens=False)


def test_a_stream_tells_text_and_leaves_out_stop_tokens(backbone, tokens, drawn):
    backbone.tokenizer = byte_tokenizer(fallback=False)
    end = int(drawn[0, 6])
    last = drawn[0].tolist().index(end)
    pieces = list(backbone.stream(tokens, STEPS, stop=(end,), **WARM))
    backbone.tokenizer, tokenizer = None, backbone.tokenizer
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(drawn[0, :last].tolist())
    row = drawn[1].tolist()
    stop = row.index(end) if end in row else STEPS
    assert "".join(piece.texts[1] for piece in pieces) == tokenizer.decode(row[:stop])


def test_stop_tokens_are_read_where_transformers_reads_them(tmp_path):
    tokenizer = byte_tokenizer(fallback=False)
    assert read_stop_tokens(tmp_path, tokenizer) == ()
    write = lambda name, table: (tmp_path / name).write_text(json.dumps(table))
    write("tokenizer_config.json", {"eos_token": {"content": "a"}})
    assert read_stop_tokens(tmp_path, tokenizer) == (tokenizer.token_to_id("a"),)
    assert read_stop_tokens(tmp_path, None) == ()
    write("config.json", {"text_config": {"eos_token_id": 3}})
    assert read_stop_tokens(tmp_path, tokenizer) == (3,)
    write("config.json", {"eos_token_id": 4, "text_config": {"eos_token_id": 3}})
    assert read_stop_tokens(tmp_path, tokenizer) == (4,)
    write("generation_config.json", {"eos_token_id": [5, 6], "temperature": 0.1})
    assert read_stop_tokens(tmp_path, tokenizer) == (5, 6)
    for wrong in ("end", [5, -1]):
        write("generation_config.json", {"eos_token_id": wrong})
        with pytest.raises(ConfigError, match=r"eos_token_id .*expected"):
            read_stop_tokens(tmp_path, tokenizer)


def test_how_long_answers_are_is_read_and_saved(tmp_path):
    write = lambda table: (tmp_path / "generation_config.json").write_text(json.dumps(table))
    assert read_answer_tokens(tmp_path) is None
    write({"eos_token_id": 3})
    assert read_answer_tokens(tmp_path) is None
    write({"max_new_tokens": 7})
    assert read_answer_tokens(tmp_path) == 7
    for wrong in ("7", 0):
        write({"max_new_tokens": wrong})
        with pytest.raises(ConfigError, match=r"max_new_tokens .*expected a number of tokens"):
            read_answer_tokens(tmp_path)
    for stop, tokens in (((5, 6), 7), ((), 7), ((5,), None)):
        save_generation(tmp_path, stop, tokens)
        assert (read_stop_tokens(tmp_path, None), read_answer_tokens(tmp_path)) == (stop, tokens)

"""Token ids of separators, as an operator finds them for the setting `chunking`."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from kvpatch_jax.errors import InputError
from kvpatch_jax.serving.vllm import ChunkingOptions
from kvpatch_jax.serving.vllm.token_ids import main, token_ids


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, two merges (a blank with #, and # with #), and an opening."""
    alphabet = sorted(ByteLevel.alphabet())
    words = [*alphabet, "Ġ#", "##"]
    made = Tokenizer(BPE({word: index for index, word in enumerate(words)}, [("Ġ", "#"), ("#", "#")]))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.add_special_tokens([AddedToken("<|im_start|>", special=True)])
    return made


def ids_of(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def test_a_special_token_is_one_id_everywhere(tokenizer):
    found, share = token_ids(ids_of(tokenizer), "<|im_start|>")
    assert (found, share) == ([[tokenizer.token_to_id("<|im_start|>")]], 1.0)


def test_all_forms_of_a_text_are_found(tokenizer):
    one, blank = (tokenizer.token_to_id(word) for word in ("##", "Ġ#"))
    found, share = token_ids(ids_of(tokenizer), "##")
    assert found[0] == [one]
    assert share > 0.5
    found, share = token_ids(ids_of(tokenizer), " #")
    assert found[0] == [blank]
    assert 0 < share <= 1


def test_a_text_without_ids_of_its_own_is_refused(tokenizer):
    with pytest.raises(InputError, match="at least one character"):
        token_ids(ids_of(tokenizer), "")
    with pytest.raises(InputError, match="shares tokens with any neighbour"):
        token_ids(lambda text: [len(text)], "#")


def test_the_program_prints_what_the_setting_takes(tokenizer, tmp_path, capsys):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    main([str(tmp_path / "tokenizer.json"), "<|im_start|>", "##"])
    opener, separator = map(json.loads, capsys.readouterr().out.splitlines())
    assert opener["text"] == "<|im_start|>"
    read = ChunkingOptions.read({"openers": opener["ids"], "separators": separator["ids"]})
    assert read.openers == ((tokenizer.token_to_id("<|im_start|>"),),)
    assert (tokenizer.token_to_id("##"),) in read.separators

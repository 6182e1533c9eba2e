"""Make `tokenizers.json`: a tiny vocabulary, and the ids of tiktoken (0.14) and transformers' Qwen2Tokenizer (5.23).

Run it in an environment with tiktoken and transformers: `python tests/goldens/make_tokenizers.py`. See README.md.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import base64
import json
import random
from pathlib import Path

import tiktoken
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

HERE = Path(__file__).parent
KIMI = "|".join(  # as in Moonshot's tokenization_moonshot.py
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
CORPUS = (
    "The patches of the images are packed in the order of the rows; there's nothing that we're not told. "
    "图像的补丁按行的顺序排列，没有什么没有告诉我们的。图像 图像的行 12 123 1234 2026 "
    "Größe und Maß, été à la plage, НЕТ нет, あいうえお カタカナ 한국어 aaaa aaaaaaaa    \n\n  \t x += 1;\n\n"
)
SPECIAL = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 20: "<|media_start|>", 21: "<|media_content|>", 22: "<|media_end|>"}
SPECIAL |= {23: "<|media_pad|>"}
FIXED = [
    "What is shown in the image?",
    "<|media_start|>image<|media_content|><|media_pad|><|media_end|>Describe 图像 it's 1234567.",
    "[BOS]  two  spaces \n\n\n and\r\nlines\t\t ",
    "HELLO World's ÉTÉ été Ǆungla ʰmodifier e\u0301 한국어",
    "aaaaaaaaaaaaaaaaaaaaaaa aaaaa aa",
    "",
    " ",
    "🙂🙃 ∑∫ ½ ² Ⅻ ٣٤٥",
]
ALPHABET = "aabcdehinorstTHEIM'  \n\r\t.,;!?-_1234567890图像的行没有éàßöНетあカ한🙂ʰǄ\u0301ſ\u00a0\u3000"


def train() -> tuple[dict[str, int], list[list[str]]]:
    """Returns a byte-level vocabulary of 400 tokens, all single bytes first, and its merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [CORPUS] * 4, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer.get_vocab(), json.loads(tokenizer.to_str())["model"]["merges"]


def main() -> None:
    vocabulary, merges = train()
    bytes_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokens = [bytes(map(bytes_of.__getitem__, name)) for name in sorted(vocabulary, key=vocabulary.__getitem__)]
    draw = random.Random(0)
    texts = FIXED + ["".join(draw.choices(ALPHABET, k=draw.randrange(1, 40))) for _ in range(150)]
    count, ranks = len(tokens), {token: rank for rank, token in enumerate(tokens)}
    names = {SPECIAL.get(number, f"<|reserved_token_{count + number}|>"): count + number for number in range(258)}
    kimi = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens=names)

    qwen2 = Qwen2Tokenizer(
        vocab=vocabulary, merges=[tuple(pair) for pair in merges], unk_token=None, eos_token=None, pad_token=None
    )
    qwen2.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<IMG_CONTEXT>"]})
    found = {
        "tokens": [base64.b64encode(token).decode() for token in tokens],
        "special": {str(count + number): name for number, name in SPECIAL.items()},
        "merges": merges,
        "texts": texts,
        "kimi": [kimi.encode(text, allowed_special="all") for text in texts],
        "qwen2": [qwen2.encode(text, add_special_tokens=False) for text in texts],
        "added": {str(qwen2.convert_tokens_to_ids(name)): name for name in ("<|im_start|>", "<IMG_CONTEXT>")},
    }
    (HERE / "tokenizers.json").write_text(json.dumps(found, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

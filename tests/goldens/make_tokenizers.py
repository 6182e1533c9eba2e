"""Make `tokenizers.json`: a tiny vocabulary, and the ids of tiktoken (0.14) and transformers' Qwen2Tokenizer (5.23).

Run it in an environment with tiktoken and transformers: `python tests/goldens/make_tokenizers.py`. See README.md.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import base64
import collections
import itertools
import json
import random
import re
from pathlib import Path

import tiktoken
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


def train(text: str, count: int) -> list[bytes]:
    """Byte pairs within words, the most frequent first; all single bytes before them."""
    tokens = [bytes([byte]) for byte in range(256)]
    words = [[bytes([byte]) for byte in word.encode()] for word in re.findall(r" ?\S+|\s+", text)]
    while len(tokens) < count:
        pairs = collections.Counter(pair for word in words for pair in itertools.pairwise(word))
        first, second = max(pairs, key=lambda pair: (pairs[pair], pair))
        if first + second not in tokens:
            tokens.append(first + second)
        words = [joined(word, first, second) for word in words]
    return tokens


def joined(word: list[bytes], first: bytes, second: bytes) -> list[bytes]:
    """A word with every pair of these as one."""
    found, place = [], 0
    while place < len(word):
        both = word[place : place + 2] == [first, second]
        found.append(first + second if both else word[place])
        place += 2 if both else 1
    return found


def main() -> None:
    tokens = train(CORPUS, 400)
    draw = random.Random(0)
    texts = FIXED + ["".join(draw.choices(ALPHABET, k=draw.randrange(1, 40))) for _ in range(150)]
    names = {
        len(tokens) + number: SPECIAL.get(number, f"<|reserved_token_{len(tokens) + number}|>") for number in range(258)
    }
    ranks = {token: rank for rank, token in enumerate(tokens)}
    kimi = tiktoken.Encoding(
        "kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens={n: i for i, n in names.items()}
    )

    letters = bytes_to_unicode()
    written = lambda token: "".join(letters[byte] for byte in token)
    vocabulary = {written(token): rank for rank, token in enumerate(tokens)}
    merges = []
    for token in tokens[256:]:
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        merges.append(max(known, key=lambda pair: -max(ranks[pair[0]], ranks[pair[1]])))
    merges = [(written(first), written(second)) for first, second in merges]
    qwen2 = Qwen2Tokenizer(vocab=vocabulary, merges=merges, unk_token=None, eos_token=None, pad_token=None)
    qwen2.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<IMG_CONTEXT>"]})
    found = {
        "tokens": [base64.b64encode(token).decode() for token in tokens],
        "special": {str(len(tokens) + number): name for number, name in SPECIAL.items()},
        "merges": [list(pair) for pair in merges],
        "texts": texts,
        "kimi": [kimi.encode(text, allowed_special="all") for text in texts],
        "qwen2": [qwen2.encode(text, add_special_tokens=False) for text in texts],
        "added": {str(qwen2.convert_tokens_to_ids(name)): name for name in ("<|im_start|>", "<IMG_CONTEXT>")},
    }
    (HERE / "tokenizers.json").write_text(json.dumps(found, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

"""The rules of the main comparison, fixed before its seed is looked at: `rules.json`, read here and nowhere else.

Seeds, sizes, what is left out, which arms there are at which settings, when a rank is sufficient, when an arm beats the
patch, and the bars of every verdict. Whoever changes the file changes its digest, which stands in results.json and in
the report. Version 1 was written after version 1 of the small task had been looked at: what is new in it is that a
sufficient rank is again judged by chain and aggregate alone, as it was before override questions were added, and that
the headline is the mean over instances. Version 2 came after version 1's rows: bytes are judged with everything that
lies stored, by the number of antecedents, KV(B|A) in 16 bits is an arm, and the arms of the headline are listed.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("rules.json")


@dataclasses.dataclass(frozen=True)
class ArmRules:
    """At which settings the arms of the main comparison are tried.

    Attributes:
      ranks: of the patch, and of truncated KV(B|A). shown_rank: of the patch's variants. rotated_ranks, int8_ranks,
        pooled_ranks: of the patch formed after the rotation, in 8 bits, in a pooled basis. encodings: of the canonical,
        each with a patch in 4 bits of the encoded_ranks.
      budgets: of token repairs, as shares of the tokens. byte_ranks: ranks whose bytes they are matched to.
      query_budgets: of tokens chosen by the question. query_layers: whose attention chooses, as shares of the depth.
      random_budget: of tokens drawn at random. bits: of KV(B|A). residual_depths: shares of the depth.
      only_among_all: patterns of the arms that are tried where all are asked for, and not by default.
    """

    ranks: tuple[int, ...]
    shown_rank: int
    rotated_ranks: tuple[int, ...]
    budgets: tuple[float, ...]
    byte_ranks: tuple[int, ...]
    int8_ranks: tuple[int, ...]
    encodings: tuple[str, ...]
    encoded_ranks: tuple[int, ...]
    query_budgets: tuple[float, ...]
    query_layers: tuple[float, ...]
    random_budget: float
    bits: tuple[int, ...]
    residual_depths: tuple[float, ...]
    pooled_ranks: tuple[int, ...]
    only_among_all: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rules:
    """What `rules.json` says.

    Attributes:
      version: of the rules. digest: 16 hexadecimal digits over the file's bytes.
      seed: of the held-out contexts. contexts, window_contexts, batch, questions: sizes, questions by kind.
      headline_backbones: the instances whose mean is the headline; headline_seeds_at_least: how many it takes;
        headline_arms: what each of them is asked in the main job.
      exclusion: what is left out of the counts, in words.
      rank_kinds, rank_tolerance: a rank is sufficient that is within the tolerance of re-prefill on all these kinds.
      beating_kinds, beating_tolerance, axes: what it takes to beat the patch (`results.dominance`).
      verdicts: the bars of the comparison with the paper, by name.
      arms: their settings.
    """

    version: int
    digest: str
    seed: int
    contexts: int
    window_contexts: int
    batch: int
    questions: Mapping[str, int]
    headline_backbones: tuple[str, ...]
    headline_seeds_at_least: int
    headline_arms: tuple[str, ...]
    exclusion: str
    rank_kinds: tuple[str, ...]
    rank_tolerance: float
    beating_kinds: tuple[str, ...]
    beating_tolerance: float
    axes: tuple[str, ...]
    verdicts: Mapping[str, Any]
    arms: ArmRules


def read_rules(path: Path = PATH) -> Rules:
    """Reads a file of rules.

    Raises:
      KeyError, TypeError: a rule is missing, or one is not known.
    """
    text = path.read_bytes()
    found = json.loads(text)
    rank, beating, arms = (found.pop(name) for name in ("smallest_rank", "beating", "arms"))
    found |= {f"rank_{name}": value for name, value in rank.items()}
    found |= {f"beating_{name}": value for name, value in beating.items() if name != "axes"}
    found["axes"] = beating["axes"]
    # Lists of a file are tuples here, because rules never change.
    for part in (found, arms):
        part |= {name: tuple(value) for name, value in part.items() if isinstance(value, list)}
    return Rules(digest=hashlib.blake2b(text, digest_size=8).hexdigest(), arms=ArmRules(**arms), **found)


RULES = read_rules()

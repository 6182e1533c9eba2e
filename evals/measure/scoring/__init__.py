"""Scoring rules of data sets, each as its publisher states it: a prediction's text and an item to a score in [0, 1].

Scores that are defined over a set (MMLongBench-Doc's F1 over answerable questions, MuSiQue-Full's pairs, joint scores
of answers and supporting facts) are left out.
"""

import dataclasses
from collections.abc import Callable

from ..items import Item
from . import actions, anls, choices, mm_niah, mmlongbench_doc, spans


@dataclasses.dataclass(frozen=True)
class Rule:
    """A scoring rule.

    Attributes:
      score: (prediction, item) to a score in [0, 1]. It reads any text: what cannot be read as an answer scores 0.
      tokens: how many new tokens an answer may need at most.
      source: what publishes it.
    """

    score: Callable[[str, Item], float]
    tokens: int
    source: str


RULES: dict[str, Rule] = {
    "exact_match": Rule(spans.exact_match, 32, "SQuAD v1.1 (Rajpurkar et al. 2016), evaluate-v1.1.py"),
    "squad_em": Rule(spans.exact_match, 32, "SQuAD v1.1, as MuSiQue's metrics/answer.py takes it"),
    "squad_f1": Rule(spans.token_f1, 32, "SQuAD v2.0, as MuSiQue's allennlp_lib/tools/squad.py has it"),
    "hotpotqa_em": Rule(spans.exact_match, 32, "HotpotQA (Yang et al. 2018), hotpot_evaluate_v1.py"),
    "hotpotqa_f1": Rule(spans.hotpotqa_f1, 32, "HotpotQA (Yang et al. 2018), hotpot_evaluate_v1.py"),
    "slidevqa_em": Rule(spans.slidevqa_em, 32, "SlideVQA (Tanaka et al. 2023), evaluate.py"),
    "slidevqa_f1": Rule(spans.slidevqa_f1, 32, "SlideVQA (Tanaka et al. 2023), evaluate.py"),
    "anls": Rule(anls.anls, 32, "ANLS (Biten et al. 2019), as the MP-DocVQA framework's metrics.py computes it"),
    "mmlongbench_doc": Rule(
        mmlongbench_doc.mmlongbench_doc, 64, "MMLongBench-Doc (Ma et al. 2024), eval/eval_score.py"
    ),
    "mm_niah": Rule(mm_niah.mm_niah, 32, "MM-NIAH (Wang et al. 2024), calculate_scores.py"),
    "option_letter": Rule(choices.option_letter, 16, "Video-MME (Fu et al. 2024), extract_characters_regex"),
    "vlmeval_option": Rule(choices.vlmeval_option, 32, "VLMEvalKit, vlmeval/utils/matching_util.py"),
    "gui_odyssey": Rule(actions.gui_odyssey, 32, "GUI-Odyssey (Lu et al. 2024), GUIOdyssey_action_matching.py"),
    "android_control": Rule(
        actions.android_control, 64, "AndroidControl (Li et al. 2024), with the 14 % of Android in the Wild"
    ),
    "tool_call": Rule(actions.tool_call, 256, "this library: no published rule exists for these traces"),
}
"""All rules by their names."""

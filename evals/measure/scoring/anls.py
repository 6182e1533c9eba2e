"""Average normalised Levenshtein similarity."""

from ..items import Item


def edit_distance(first: str, second: str) -> int:
    """Counts the insertions, deletions and substitutions that turn one text into the other."""
    row = list(range(len(second) + 1))
    for number, letter in enumerate(first, 1):
        above, row[0] = row[0], number
        for column, other in enumerate(second, 1):
            cost = min(row[column] + 1, row[column - 1] + 1, above + (letter != other))
            above, row[column] = row[column], cost
    return row[-1]


def similarity(first: str, second: str) -> float:
    """Computes 1 − distance / the longer length; 1 for two empty texts."""
    longer = max(len(first), len(second))
    return 1 - edit_distance(first, second) / longer if longer else 1.0


def anls(prediction: str, item: Item) -> float:
    """Computes ANLS of DocVQA and MP-DocVQA: the best similarity over the answers, 0 below .5.

    Case and white space at the ends do not count. As in the MP-DocVQA framework (rubenpt91/MP-DocVQA-Framework,
    metrics.py), an empty prediction scores 0, and so does "none"; a similarity of exactly .5 counts. Biten et al. 2019
    (arXiv 1907.00490) write "< τ" for what counts, which differs at .5 alone.
    """
    said = prediction.strip().lower()
    if said in ("", "none"):
        return 0.0
    best = max(similarity(answer.strip().lower(), said) for answer in item.answers)
    return best if best >= 0.5 else 0.0

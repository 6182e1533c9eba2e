"""All estimators by name, in the order of the table, made one after another."""

from collections.abc import Callable, Iterator, Sequence

from .coefficients import DeepForward, RecomputedSample, SingleAntecedents
from .contexts import EstimationPlan
from .estimate import Estimator
from .fitting import SharedDirections
from .negatives import AntecedentOperator, AntecedentStream, KeySimilarity, ShallowSeed, SinkProsthesis
from .served_chunk import MeasuredChunk

SHARES = (0.05, 0.1, 0.15)
"""Of the tokens that are recomputed."""
KEY_SHARE = 0.15
SINKS = (1, 4)


def estimators(
    plan: EstimationPlan, layers: int, directions: SharedDirections, fitted: Sequence[MeasuredChunk]
) -> Iterator[tuple[str, Estimator]]:
    """Fits and yields every estimator: the five that Kamera rules out, then ours.

    Args:
      layers: of the backbone; parts of a forward are shares of them.
      directions, fitted: of contexts that are not measured.
    """
    third, half, deepest = max(1, layers // 3), layers // 2, layers * 3 // 4
    makers: dict[str, Callable[[], Estimator]] = {}
    for count in SINKS:
        makers[f"sink, {count} token{'s' * (count > 1)}"] = lambda count=count: SinkProsthesis(count)
    for others in sorted({max(1, plan.others // 4), max(1, plan.others // 2), plan.others}):
        makers[f"antecedent's operator, {others} other chunks"] = lambda n=others: AntecedentOperator(directions, n)
    makers[f"key similarity, {KEY_SHARE:.0%} of tokens"] = lambda: KeySimilarity(KEY_SHARE)
    makers["antecedent stream"] = lambda: AntecedentStream(directions, fitted)
    for name, stop in (("third", third), ("half", half)):
        makers[f"shallow seed, lower {name}"] = lambda stop=stop: ShallowSeed(directions, fitted, stop)

    for name, start in (("half", half), ("quarter", deepest)):
        makers[f"deep forward, upper {name}"] = lambda start=start: DeepForward(start)
        makers[f"deep forward, upper {name}, projected"] = lambda start=start: DeepForward(start, directions)
        makers[f"deep forward, upper {name}, corrected"] = lambda start=start: DeepForward(start, directions, fitted)
    makers["sum of single antecedents, whole"] = SingleAntecedents
    makers[f"sum of single antecedents, rank {plan.rank}"] = lambda: SingleAntecedents(plan.rank)
    for share in SHARES:
        makers[f"{share:.0%} of tokens"] = lambda share=share: RecomputedSample(share, "nothing")
        makers[f"{share:.0%} of tokens, nearest"] = lambda share=share: RecomputedSample(share, "nearest")
        makers[f"{share:.0%} of tokens, kernel"] = lambda share=share: RecomputedSample(
            share, "kernel", directions, fitted
        )

    for name, make in makers.items():
        yield name, make()

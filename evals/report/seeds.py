"""The headline as a table: what every way of reuse answers on the mean over training seeds, with their spread."""

from collections.abc import Iterable, Mapping, Sequence

from ..results.headline import Spread, headline, smallest_rank_of_mean
from ..results.rows import Row, Rows
from ..results.tables import markdown_table
from .comparison import VISIBLE
from .figures import MULTI_HOP, Results, arm_label
from .wording import number


def tables_of(runs: Iterable[Results]) -> dict[str, list[Row]]:
    """Takes of each run its own model's accuracies in the main comparison, by the model's name."""
    tables = {}
    for results in runs:
        model = Rows(results).model
        own = [row for row in results["rows"] if row["model"] == model and row["probe"] == VISIBLE]
        tables[model] = [
            {name: row[name] for name in ("probe", "arm", "metric", "value")}
            for row in own
            if row["metric"].startswith("accuracy.")
        ]
    return tables


def spread(of: Spread) -> str:
    """Formats a mean with the least and the largest seed: "0.446 (0.223 to 0.561)"."""
    return f"{number(of.mean)} ({number(of.low)} to {number(of.high)})"


def seeds_table(tables: Mapping[str, Sequence[Row]], arms: Sequence[str], kinds: Sequence[str] = MULTI_HOP) -> str:
    """Makes a Markdown table of accuracy by kind; arms that not every seed has are left out."""
    means = headline(tables)
    metrics = [f"accuracy.{kind}" for kind in kinds]
    here = [arm for arm in arms if all((VISIBLE, arm, metric) in means for metric in metrics)]
    lines = [[arm_label(arm), *(spread(means[VISIBLE, arm, metric]) for metric in metrics)] for arm in here]
    return markdown_table(["way of reuse", *kinds], lines)


def seeds_sentence(tables: Mapping[str, Sequence[Row]]) -> str:
    """Says which models the means are of and which rank suffices on them."""
    rank = smallest_rank_of_mean(tables)
    enough = "No rank tried suffices on the mean" if rank is None else f"Rank {rank} suffices on the mean"
    return (
        f"The headline: means over {len(tables)} training seeds ({', '.join(tables)}), the least and the largest in "
        f"brackets. {enough}, by the rule."
    )

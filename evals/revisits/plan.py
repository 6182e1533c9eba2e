"""Sizes of the suite, the models that it runs, and its parts."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..tolerance.contexts import DECODER
from ..trained import CONTROL, DOCUMENTS, MAIN, SHEETS, backbone_names
from .contents import TEXTS
from .visits import PIECES


@dataclasses.dataclass(frozen=True)
class RevisitPlan:
    """Sizes of the suite.

    Attributes:
      main, others: traces by window, of the first model of a task of images, and of each other one.
      texts: likewise of the decoder, by task.
      revisits: steps of a visit after every piece was shown once; fewer behind small windows.
      text_revisits: likewise, of texts.
      run: the largest window behind which sessions that forget are run, beside being counted. Larger ones prefill for
        minutes.
      seed: of the traces.
    """

    main: Mapping[int, int]
    others: Mapping[int, int]
    texts: Mapping[str, Mapping[int, int]]
    revisits: int = 16
    text_revisits: int = 8
    run: int = 8
    seed: int = 20261126


FULL = RevisitPlan(
    main={16: 1, 8: 3, 4: 4},
    others={16: 1, 8: 1, 4: 1},
    texts={"prose": {16: 1, 8: 1, 4: 2}, "code": {8: 1, 4: 2}},
)
QUICK = RevisitPlan(main={2: 1}, others={}, texts={}, revisits=4)


class RevisitModel(NamedTuple):
    """A model and the task that it does.

    Attributes:
      name: on the command line and in `evals.trained`.
      task: of `contents.CONTENTS`.
      main: whether it is the first of its task.
    """

    name: str
    task: str
    main: bool


class RevisitPart(NamedTuple):
    """One trace of one model."""

    model: RevisitModel
    window: int
    trace: int

    @property
    def name(self) -> str:
        """Its key in the file of parts."""
        return f"{self.model.name}, {self.model.task}, window {self.window}, trace {self.trace}"

    @property
    def contexts(self) -> int:
        """Contexts of the trace: twice as many pieces as stay in the window, so that revisits miss it."""
        return max(2 * self.window // PIECES, 1)


def models() -> list[RevisitModel]:
    """Lists all shipped models and the pretrained decoder; the first one of each task comes first."""
    found = [RevisitModel(name, "small", name == MAIN) for name in (*backbone_names(), CONTROL)]
    for folder, task in ((SHEETS, "sheets"), (SHEETS.with_name("sheets_qwen3_vl"), "sheets"), (DOCUMENTS, "documents")):
        for path in sorted(folder.glob("*/config.json")):
            name = path.parent.name
            found.append(RevisitModel(f"{folder.name}/{name}", task, folder in (SHEETS, DOCUMENTS) and name == MAIN))
    found += [RevisitModel(DECODER, task, True) for task in TEXTS]
    return sorted(found, key=lambda model: not model.main)


def traces_of(plan: RevisitPlan, model: RevisitModel) -> Mapping[int, int]:
    """Returns how many traces of each window a model runs."""
    if model.task in TEXTS:
        return plan.texts.get(model.task, {})
    return plan.main if model.main else plan.others


def parts(plan: RevisitPlan, model: RevisitModel, windows: tuple[int, ...] = ()) -> Iterator[RevisitPart]:
    """Yields the parts of a model, of some windows or of all of the plan."""
    for window, count in traces_of(plan, model).items():
        for trace in range(count if not windows or window in windows else 0):
            yield RevisitPart(model, window, trace)


def revisits_of(plan: RevisitPlan, part: RevisitPart) -> int:
    """Returns the revisits of a visit: not more than there are pieces, whole contexts of them."""
    most = plan.text_revisits if part.model.task in TEXTS else plan.revisits
    return min(most, part.contexts * PIECES)

"""What a command asks for, and what it takes: data, model, arms and parts, made alike in every process."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from models import Buckets, ModelBackbone, load

from ..datasets import RecordedDataset
from ..harness.parts import ExpectedPace
from ..trained import ROOT
from . import formats
from .arms import MeasureArm, chosen_arms
from .frame import frame_of, speakable
from .items import ItemSet, Refusal
from .plan import PlannedContext, WorkEstimate, contexts_of, estimate, longest_prompt, sampled
from .suite import MeasureSetup, dataset


@dataclasses.dataclass(frozen=True)
class MeasureRequest:
    """What a command asks for, as its flags say it; sent to other processes as it is.

    Attributes:
      model, data: where they are. format: of the data, None where the file says it.
      media, text_characters, frames, keep: how the data is read, as `data_files.ReadOptions` says.
      arms: patterns. limit, seed: of a sample of the items. frame: around pieces and question.
      answer_tokens: a number, "rule" or "answer". max_tokens: of a prompt; None: the model's own.
      dtype: as `models.load` takes it.
      again: the command, for messages.
    """

    model: str
    data: str
    format: str | None
    media: str | None
    text_characters: int
    frames: int | None
    keep: int | None
    arms: tuple[str, ...]
    limit: int
    seed: int
    frame: str
    answer_tokens: int | str
    max_tokens: int | None
    dtype: str
    again: str


@dataclasses.dataclass(frozen=True)
class PreparedMeasurement:
    """A request with its data read, its model loaded and its work planned.

    Attributes:
      left_out: lines and items that are not asked, each with its reason. unserved: arms that this model cannot serve.
      described: the parts, and all that they depend on.
    """

    data: ItemSet
    left_out: Sequence[Refusal]
    arms: Sequence[MeasureArm]
    unserved: Sequence[MeasureArm]
    contexts: Sequence[PlannedContext]
    expected: WorkEstimate
    described: RecordedDataset

    @property
    def pace(self) -> ExpectedPace:
        """How fast parts are expected; the estimate counts as much as a tenth of the work: the first ones compile."""
        return ExpectedPace(self.expected.tokens_per_second, 0.1 * sum(self.expected.tokens))


def load_asked(name: str, dtype: str) -> tuple[str, ModelBackbone]:
    """Loads the model that a command names; returns where it is, too.

    Args:
      name: a shipped instance, or what `models.load` takes.
    """
    model = str(ROOT / name) if (ROOT / name / "config.json").exists() else name
    return model, load(model, dtype=dtype, buckets=Buckets())


def prepare(request: MeasureRequest) -> PreparedMeasurement:
    """Reads the data, loads the model and plans the parts.

    Raises:
      InputError: data that cannot be read, or that this model cannot be asked. What `models.load` raises.
    """
    data = formats.read(
        Path(request.data),
        request.format,
        media=None if request.media is None else Path(request.media),
        text_characters=request.text_characters,
        frames=request.frames,
        keep=request.keep,
    )
    model, backbone = load_asked(request.model, request.dtype)
    frame = frame_of(backbone, request.frame, request.again)
    # What is not in the sample is not looked at.
    sample = dataclasses.replace(data, items=sampled(data.items, request.limit, request.seed))
    asked, refusals = speakable(backbone, frame, sample)
    arms, unserved = chosen_arms(request.arms, backbone.layout)

    contexts = contexts_of(asked)
    most = request.max_tokens or longest_prompt(model)
    measurement = MeasureSetup(backbone, frame, arms, most, request.answer_tokens)
    steps = max(measurement.steps(item) for context in contexts for item in context.items)
    expected = estimate(backbone, frame, contexts, arms, steps)
    settings = {"model": Path(model).name, "dtype": request.dtype, "limit": request.limit, "seed": request.seed}
    described = dataset(measurement, data, contexts, expected, settings)
    return PreparedMeasurement(data, [*data.refusals, *refusals], arms, unserved, contexts, expected, described)

"""Data sets: contexts, questions and a scorer, on which every arm is measured alike.

The small task's scenes and the packed tasks (sheets, documents) differ in how contexts are drawn and how questions are
packed. `PageReader` is all that arms and tables need of either. To add a data set, implement it, or describe a task of
packed questions as a `PackedDataset` and hand it to `evals.runner.run`. Text on real weights (`evals.pretrained`) is
measured part by part: a `RecordedDataset`, for `evals.runner.run_recorded`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from kvpatch_jax.errors import InputError
from models import ModelBackbone

from .arms import KV, QuestionReader
from .harness.frame import Row
from .harness.parts import PlannedPart
from .sheets_task.reader import PackedReader, move_page
from .sheets_task.task_spec import TaskSpec


@runtime_checkable
class ScoredAnswers(Protocol):
    """What an arm answers: a predicted token per question, and the KL from a reference's answers, [B, Q] each."""

    @property
    def predicted(self) -> np.ndarray: ...

    def divergence_from(self, reference: Any) -> np.ndarray:
        """Computes KL(reference ‖ this) per question, in nats."""
        ...


@runtime_checkable
class AskedQuestions(Protocol):
    """Questions as items: kind, whether they count, and the right answer, [B, Q] each."""

    @property
    def kind(self) -> np.ndarray: ...

    @property
    def valid(self) -> np.ndarray: ...

    @property
    def answer(self) -> np.ndarray: ...


@runtime_checkable
class PageReader(QuestionReader, Protocol):
    """One batch of a data set: a reused page, the questions asked of it, and how caches are read.

    Attributes:
      kinds: names of the kinds of question, by number.
      probes: the settings that every arm is read in; arms that choose tokens by the question, in the first alone.
    """

    @property
    def kinds(self) -> tuple[str, ...]: ...

    @property
    def probes(self) -> tuple[str, ...]: ...

    def read(self, cache: KV, probe: str) -> Any:
        """Asks every question over an engine-frame cache of the prefix; returns `ScoredAnswers`."""
        ...

    def asked(self, probe: str) -> AskedQuestions:
        """Returns the questions that a probe counts."""
        ...


@dataclasses.dataclass(frozen=True)
class PackedProbe:
    """Contexts of one kind.

    Attributes:
      size: of the contexts, by its name in the task.
      title: in tables.
      options: handed to `TaskSpec.sample` besides.
    """

    size: str
    title: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class PackedDataset:
    """A task of packed questions and what is measured of it.

    Attributes:
      task: its name, that of the flag.
      folder: of its shipped instances.
      spec: how contexts are drawn, asked about and laid out.
      probes: the contexts measured, by the name behind the task's in rows. All arms are tried in the first.
      questions: asked of each context, by kind.
      visible: classes of a page's cells by what can be seen of them.
    """

    task: str
    folder: Path
    spec: TaskSpec
    probes: Mapping[str, PackedProbe]
    questions: Mapping[str, int]
    visible: tuple[str, ...]

    def reader(self, backbone: ModelBackbone, probe: str, seed: int, number: int, batch: int) -> PackedReader:
        """Draws a batch of contexts and its questions, and prefills what is reused."""
        wanted = self.probes[probe]
        size = self.spec.sizes[wanted.size]
        rng = np.random.default_rng([seed, number, size.sheets])
        contexts = self.spec.sample(rng, batch, size, **wanted.options)
        questions = self.spec.ask(contexts, rng, self.questions)
        return PackedReader(f"{self.task}.{probe}", move_page(backbone, contexts, self.spec), questions)

    def instances(self, name: str) -> list[Path]:
        """Finds the directories of the instances asked for.

        Args:
          name: "all" (those of the first kind), a name in the data set's folder, a checkpoint directory, a folder of
            such directories, or the name of a folder beside the data set's: the instances of another architecture.

        Raises:
          InputError: no instance is found.
        """
        shipped = _checkpoints(self.folder)
        if name == "all" and shipped:
            return shipped

        for path in (self.folder / name, Path(name)):
            if (path / "config.json").exists():
                return [path]

        # Only this data set's other kinds: the folder above holds other tasks' instances too.
        beside = [self.folder.parent / name] if name.startswith(f"{self.folder.name}_") else []
        for folder in (*beside, Path(name)):
            if checkpoints := _checkpoints(folder):
                return checkpoints

        names = ", ".join(path.name for path in shipped) or "none is shipped"
        raise InputError(
            f"backbone of the {self.task} task: got {name!r}; expected a checkpoint directory, all, or one of: {names}"
        )


@dataclasses.dataclass(frozen=True)
class RecordedDataset:
    """Contexts and questions that are measured part by part, every part kept when it is done.

    Attributes:
      config: what the parts depend on, "model" among it; JSON can hold it.
      parts: all of them, in the order in which they are measured; each yields records.
      rows: the scorer: makes rows of all finished parts.
      packages: whose versions the results name.
      shown: what the results say of the run besides `config`.
      unlimited: the first so many parts are measured whatever limit a run has.
    """

    config: Mapping[str, Any]
    parts: Sequence[PlannedPart]
    rows: Callable[[Sequence[Mapping[str, Any]]], list[Row]]
    packages: tuple[str, ...]
    shown: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unlimited: int = 0


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/config.json"))

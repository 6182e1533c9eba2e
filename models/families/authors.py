"""Checkpoints in their authors' own formats, read as the family that transformers made of them.

Configuration, tensors and image settings are translated; what is saved afterwards is in transformers' format.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import ConfigError

from ..checkpoints import LoRASource, Rule, TensorSource, ViewSource

Raw = Mapping[str, Any]


def no_template(raw: Raw) -> None:
    """Says that a format's prompts are not known."""
    return None


def no_videos(raw: Raw, root: Path) -> None:
    """Says that a format's authors publish no rule for videos."""
    return None


@dataclasses.dataclass(frozen=True)
class AuthorsFormat:
    """One such format.

    Attributes:
      architecture: the name in its `config.json`. model_type: for a file that names none.
      config: (config.json, directory) → `config.json` of the family that it is read as, named in `architectures`.
      rules: (configuration, config.json) → what the tensors become.
      settings: (config.json, directory) → image settings.
      video: (config.json, directory) → video settings; None where the authors publish no rule for videos.
      template: config.json → the authors' prompt format as `Family.template`; None where that is not known.
    """

    architecture: str
    model_type: str
    config: Callable[[Raw, Path], dict[str, Any]]
    rules: Callable[[Any, Raw], Sequence[Rule]]
    settings: Callable[[Raw, Path], Any]
    template: Callable[[Raw], str | None] = no_template
    video: Callable[[Raw, Path], Any] = no_videos

    def merged(self, source: TensorSource, adapter: str | os.PathLike[str]) -> TensorSource:
        """Returns a checkpoint's tensors with a LoRA adapter of the authors' modules merged, before they are
        translated.

        Raises:
          ConfigError, WeightsError: as `LoRASource`.
        """
        plain = source.tensors
        return LoRASource(source, adapter, lambda name: name if name in plain else None)

    def source(self, config: Any, raw: Raw, source: TensorSource) -> TensorSource:
        """Returns the tensors under the family's names.

        Raises:
          WeightsError: one that does not have the size that the configuration says.
        """
        return ViewSource(source, self.rules(config, raw), f"{self.architecture}, here as {config.family.architecture}")


def expect(raw: Raw, place: str, **values: Any) -> None:
    """Refuses a table where a key has another value than this, or than these (a tuple of them).

    Raises:
      ConfigError: it names the key, its value and those that are read.
    """
    for key, allowed in values.items():
        choices = allowed if isinstance(allowed, tuple) else (allowed,)
        if raw.get(key) not in choices:
            raise ConfigError(f"{place}: got {key} {raw.get(key)!r}; expected {' or '.join(map(repr, choices))}")

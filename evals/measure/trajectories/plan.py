"""What is replayed: the episodes that a model can be asked, each a part of its own, and all that they depend on."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...harness.parts import PlannedPart
from ..episodes import Episode, EpisodeSet, canonical, step_items
from ..frame import speakable
from ..items import ItemSet, Refusal
from ..plan import content_key
from .replayed import EpisodeReplay, Record


@dataclasses.dataclass(frozen=True)
class PlannedReplay:
    """A replay's parts.

    Attributes:
      config: what the parts depend on. episodes: that are replayed, one a part.
      left_out: what readers and vocabulary refused.
    """

    config: dict[str, Any]
    episodes: Sequence[Episode]
    parts: Sequence[PlannedPart]
    left_out: Sequence[Refusal]


def planned_replay(replay: EpisodeReplay, data: EpisodeSet, limit: int, settings: Mapping[str, Any]) -> PlannedReplay:
    """Plans the first `limit` episodes of which a model can be asked every step; 0 plans all of them.

    Args:
      settings: what else the parts depend on, "model" among it.

    Raises:
      InputError: no step can be asked; the message says of what kind of model or data one can.
    """
    chosen = list(data.episodes)[: limit or None]
    items = {episode.id: step_items(episode) for episode in chosen}
    every = [item for own in items.values() for item in own]
    asked, refusals = speakable(
        replay.backbone, replay.frame, ItemSet(data.format, data.source, every, data.refusals, "", "")
    )
    known = {item.id for item in asked}
    episodes = [episode for episode in chosen if items[episode.id] and all(i.id in known for i in items[episode.id])]

    digest = hashlib.sha256()
    for item in every:
        # A data set that was moved is the same.
        contents = [piece.content for piece in item.pieces]
        shown = [content.name if isinstance(content, Path) else content_key(content) for content in contents]
        digest.update(canonical([item.id, item.question, item.answers, shown]).encode())
    config = {
        **settings,
        "fingerprint": replay.backbone.fingerprint,
        "data": data.source.name,
        "format": data.format,
        "digest": digest.hexdigest(),
        "frame": replay.frame.name,
        "keep": replay.keep,
        "reused": list(replay.reused),
        "answer_tokens": replay.answer_tokens,
        "max_tokens": replay.most,
        "episodes": len(episodes),
    }
    parts = [
        PlannedPart(f"{number}: {episode.id}", functools.partial(_measure, replay, episode))
        for number, episode in enumerate(episodes)
    ]
    return PlannedReplay(config, episodes, parts, [*data.refusals, *refusals])


def _measure(replay: EpisodeReplay, episode: Episode, _: Any) -> Iterator[Record]:
    return replay.records(episode)

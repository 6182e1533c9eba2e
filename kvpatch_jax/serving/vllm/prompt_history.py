"""What precedes each chunk of a prompt: the identities and keys under which KV behind it is found again."""

import collections
import functools
from collections.abc import Sequence

from ...cache import Identities, Likeness, identity, likeness_keys, prefilled
from .segments import PromptSegment
from .settings import RequestOptions
from .survivors import SurvivorKey


class PromptHistory:
    """The chunks of one prompt with the identities that an exact prefill of it gives them.

    The *lead* of a prompt is the texts in front of its first image; of a prompt without images, its first chunk.
    Agents keep it while everything behind it comes and goes.

    Attributes:
      segments: every chunk, from the start of the prompt.
      ids: of the chunks.
      lead: number of chunks in the lead.
    """

    def __init__(self, segments: Sequence[PromptSegment]):
        self.segments = tuple(segments)
        self.ids = tuple(segment.id for segment in segments)
        texts = next((place for place, segment in enumerate(segments) if segment.modality != "text"), 0)
        self.lead = max(texts, 1)

    @functools.cached_property
    def exact(self) -> Identities:
        """Identities of the chunks where all of them are prefilled."""
        return prefilled(self.ids)

    def alike(self, index: int) -> dict[Likeness, str]:
        """Returns the keys of stored prefills that were computed behind chunks like these, as `likeness_keys`."""
        return likeness_keys(self.exact[: min(self.lead, index)], self.ids[index - 1]) if index else {}

    def survivor_key(self, index: int, options: RequestOptions) -> SurvivorKey:
        """Returns the name of what a request leaves of a chunk: one version behind a lead, per agent and repeat."""
        id, lead = self.ids[index], self.exact[: min(self.lead, index)]
        return SurvivorKey(options.tenant, options.agent, identity(id, f"repeat {self._repeats[index]}", lead))

    @functools.cached_property
    def _repeats(self) -> list[int]:
        """How many chunks with the same content precede each."""
        counts, repeats = collections.Counter[str](), []
        for id in self.ids:
            repeats.append(counts[id])
            counts[id] += 1
        return repeats

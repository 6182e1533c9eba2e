"""What precedes each chunk of a prompt, and how that is served: the names under which KV behind it is found again."""

import collections
import functools
import itertools
from collections.abc import Sequence

from ...cache import digest_of, encoded
from ...window import Likeness, keys_behind
from .segments import PromptSegment
from .settings import RequestOptions
from .survivors import ServedState, SurvivorKey


class PromptHistory:
    """The chunks of one prompt with what stands in front of each.

    The *lead* of a prompt are the texts in front of its first image; of a prompt without images, its first chunk.
    Agents keep it while everything behind it comes and goes.

    Attributes:
      segments: every chunk, from the start of the prompt.
      lead: how many of them are the lead.
    """

    def __init__(self, segments: Sequence[PromptSegment]):
        self.segments = tuple(segments)
        texts = next((place for place, own in enumerate(segments) if own.modality != "text"), 0)
        self.lead = max(texts, 1)

    def front(self, index: int) -> str:
        """Returns the digest of all chunks in front of one, if they are exact."""
        return self._fronts[index]

    def alike(self, index: int) -> dict[Likeness, str]:
        """Returns the keys of stored prefills that were computed behind chunks like these, as `keys_behind`."""
        if not index:
            return {}
        return keys_behind(self.front(min(self.lead, index)), self.segments[index - 1].id)

    @functools.cached_property
    def _fronts(self) -> list[str]:
        # One from the other, because a prompt may have thousands of chunks.
        def behind(front: str, segment: PromptSegment) -> str:
            return digest_of([encoded(front), encoded(segment.id)], size=16)

        return list(itertools.accumulate(self.segments, behind, initial=digest_of([b"front"], size=16)))

    @functools.cached_property
    def _repeats(self) -> list[int]:
        """How many chunks with the same content stand in front of each."""
        seen, repeats = collections.Counter[str](), []
        for segment in self.segments:
            repeats.append(seen[segment.id])
            seen[segment.id] += 1
        return repeats

    def survivor_key(self, index: int, options: RequestOptions) -> SurvivorKey:
        """Returns the name of what a request leaves of a chunk."""
        lead = self.front(min(self.lead, index))
        return SurvivorKey(options.tenant, options.agent, lead, self.segments[index].id, self._repeats[index])

    def exact(self, index: int) -> ServedState:
        """Returns the state of a chunk whose KV is that of a prefill of the prompt."""
        return ServedState(self.segments[index].id, self.front(index))

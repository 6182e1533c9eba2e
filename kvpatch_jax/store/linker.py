"""Resolution of references in a prompt, such as `IMAGE#LOUVRE2025`, to chunks of the tenant or the operator.

MPIC, section 3.1. A name is looked up in the tenant's own library first, then in the operator's; a name with a version
only in the latter. Names suggested in error messages come from the tenant's own library only.
"""

import contextlib
import dataclasses
import difflib
from typing import Any, Literal

from ..cache import Text, check_text, fingerprint_of
from ..errors import InputError
from .fetch import Request
from .libraries import DynamicLibrary, Resource, StaticLibrary
from .references import Reference, parse_prompt
from .store import ChunkStore


@dataclasses.dataclass(frozen=True, eq=False)
class LinkedChunk:
    """A resolved reference of a prompt.

    Attributes:
      reference: the reference in the prompt.
      library: the library that has it.
      resource: the library's resource, with its version.
      id: id of its chunk.
      backbone: backbone of its chunk.
      store: the operator's store, if it is of the dynamic library.
    """

    reference: Reference
    library: Literal["static", "dynamic"]
    resource: Resource
    id: str = dataclasses.field(repr=False)
    backbone: str
    store: ChunkStore | None = dataclasses.field(repr=False)

    @property
    def request(self) -> Request:
        """Request for `fetch`: the chunk is read from the tenant's store or the operator's, or else computed."""

        def item() -> Any:
            return self.resource.item

        return Request(self.id, self.backbone, item=item, expires=self.resource.expires, shared=self.store)


class LinkedPrompt:
    """A prompt with resolved references. Holds versions of dynamic references until `close`.

    Attributes:
      segments: texts and chunks in the order of the prompt.
    """

    def __init__(self, segments: tuple[str | LinkedChunk, ...], stack: contextlib.ExitStack):
        self.segments, self._stack = segments, stack

    @property
    def chunks(self) -> tuple[LinkedChunk, ...]:
        """Chunks in order."""
        return tuple(segment for segment in self.segments if isinstance(segment, LinkedChunk))

    @property
    def requests(self) -> list[Request]:
        """Requests for `fetch`, one per chunk, in order."""
        return [chunk.request for chunk in self.chunks]

    @property
    def items(self) -> list[Any]:
        """Items for `Backbone.prepare` to prefill the prompt, with the content of each reference in its place."""
        return [Text(segment) if isinstance(segment, str) else segment.resource.item for segment in self.segments]

    def close(self) -> None:
        """Releases versions. Idempotent."""
        self._stack.close()

    def __enter__(self) -> "LinkedPrompt":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Linker:
    """Resolver of references for one tenant and one backbone.

    Args:
      backbone: fingerprint of the model that will use the chunks.
      static: the tenant's library, or None.
      dynamic: the operator's library, or None.

    Raises:
      InputError: the fingerprint is invalid.
    """

    def __init__(self, backbone: str, static: StaticLibrary | None = None, dynamic: DynamicLibrary | None = None):
        self.backbone, self.static, self.dynamic = fingerprint_of(backbone, "linker"), static, dynamic

    def link(self, prompt: str) -> LinkedPrompt:
        """Splits a prompt into texts and chunks, in order. Module `references` defines the syntax.

        Raises:
          InputError: neither library has a reference;
          a reference was put as a chunk of another backbone only; the prompt is no str, or it has no
            reference and looks like a file name. Nothing is held in these cases.
        """
        parts = parse_prompt(prompt)
        if all(isinstance(part, str) for part in parts):
            check_text(prompt, "linker: prompt")
        with contextlib.ExitStack() as stack:
            segments = [part if isinstance(part, str) else self._resolve(part, stack) for part in parts]
            return LinkedPrompt(tuple(segments), stack.pop_all())

    def resolve(self, reference: str) -> LinkedPrompt:
        """Links a single reference, as a retriever returns it. Raises as `link`."""
        linked = self.link(reference)
        if len(linked.segments) == 1 and linked.chunks:
            return linked
        linked.close()
        raise InputError(f"reference: got {reference[:80]!r}; expected KIND#NAME")

    def _resolve(self, reference: Reference, stack: contextlib.ExitStack) -> LinkedChunk:
        if self.static is not None and reference.version is None:
            resource = self.static.get(reference.kind, reference.name)
            if resource is not None:
                id = resource.chunk_id(self.backbone)
                return LinkedChunk(reference, "static", resource, id, self.backbone, None)

        if self.dynamic is not None:
            version = self.dynamic.open(reference.kind, reference.name, reference.version)
            if version is not None:
                resource = stack.enter_context(version)
                id = resource.chunk_id(self.backbone)
                return LinkedChunk(reference, "dynamic", resource, id, self.backbone, self.dynamic.store)

        # Of the operator's library nothing is suggested: its names are not for every tenant.
        names = [] if self.static is None else [str(entry.reference) for entry in self.static.entries()]
        similar = difflib.get_close_matches(str(dataclasses.replace(reference, version=None)), names, n=3)
        hint = f"one of {', '.join(similar)}, or another that is there" if similar else "a reference that is there"
        raise InputError(f"{reference}: no library has it; expected {hint}")

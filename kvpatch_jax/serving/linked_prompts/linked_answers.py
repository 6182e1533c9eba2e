"""Answers to prompts with references: linking, repair in one forward, decoding, retrieval while decoding.

Source: MPIC (Zhao et al. 2025, arXiv 2502.01960), section 3, steps 1 to 6 of its workflow.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...backbone import Backbone, Tokens, check_is_backbone
from ...cache import Chunk, Text, chunk_id, one_form
from ...core import EngineKV, to_engine
from ...errors import InputError, StoreError
from ...patching import lead_digest, lead_tokens, make_chunk
from ...repair import (
    REPAIRS,
    RepairBudget,
    Repaired,
    SplicedCache,
    check_repairable,
    joined_tokens,
    prefix_caching,
    splice_prompt,
)
from ...sampling import check_steps
from ...store import DynamicLibrary, LinkedChunk, LinkedPrompt, Linker, Miss, Reference, StaticLibrary, fetch, pooled
from .prompt_layout import PromptLayout

Origin = Literal["store", "shared", "computed", "joined", "prefilled"]
"""Where a chunk's KV came from: as `fetch` says, or "prefilled" with the whole prompt, because loading failed."""
PREFILLED: Origin = "prefilled"
MPIC_K = RepairBudget(tokens=32)


@dataclasses.dataclass(frozen=True)
class RetrievalOptions:
    """When the operator's library is searched during decoding, and what follows a chunk that is found.

    Attributes:
      retriever: has `search(vector, k)`, such as the retrievers of `kvpatch_jax.store`, and returns references.
      trigger: says of the token ids of the answer so far whether to search now: MPIC's "when the MLLM determines that a
        retrieval is required", such as a special token at the end.
      query: maps the mean embedding of new text and answer so far, [D], to the vector that is searched for; None: as it
        is. Vectors of images are pooled features of the tower, of the same width.
      after: new text behind a chunk, from whose last token decoding goes on; at least one token.
      most: chunks per answer at most.
    """

    retriever: Any
    trigger: Callable[[Sequence[int]], bool]
    after: Any
    query: Callable[[Float[np.ndarray, " D"]], Float[np.ndarray, " D"]] | None = None
    most: int = 1


@dataclasses.dataclass(frozen=True)
class LinkedChunkRecord:
    """A reference that was linked: how it was named, where its KV came from, and after how many decoded tokens."""

    reference: str
    origin: Origin
    after: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class LinkedAnswer:
    """An answer.

    Attributes:
      ids: its tokens, the stop token included.
      linked: the references of the prompt in order, then those that were retrieved.
      repaired: of the prompt and of every retrieval; a prompt that was prefilled whole has none.
      cache: engine-frame KV of prompt and answer, {channel: [L,1,S,K,H]}, the last token's left out.
    """

    ids: tuple[int, ...]
    linked: tuple[LinkedChunkRecord, ...]
    repaired: tuple[Repaired, ...]
    cache: dict[str, Array] = dataclasses.field(repr=False)


class PromptServer:
    """Server of one user's prompts over their static library and the operator's dynamic one.

    A user reaches their own files alone: references resolve in `static`, then in `dynamic`.

    Args:
      backbone: the model.
      static: the user's library; its store keeps their canonicals.
      dynamic: the operator's library, or None.
      retrieval: searches `dynamic` while decoding; None: never.
      repair: name of a repair of `REPAIRS` that takes a prompt.
      budget: what it may spend; by default MPIC's k of 32.
      substitute: items behind which canonicals are prefilled (VLCache section 3.2); None: alone, as in MPIC.

    Raises:
      InputError: an unknown repair, retrieval without a dynamic library, or prefix caching of canonicals that were made
        behind a substitute and are no prefix of anything.
      LayoutError: a hybrid model, or layers of unlike kinds, whose cache no repair mends.
    """

    def __init__(
        self,
        backbone: Backbone,
        static: StaticLibrary,
        dynamic: DynamicLibrary | None = None,
        *,
        retrieval: RetrievalOptions | None = None,
        repair: str = "mpic",
        budget: RepairBudget | float = MPIC_K,
        substitute: Sequence[Any] | None = None,
    ):
        check_is_backbone(backbone, "prompt server")
        check_repairable(backbone.layout)
        if repair not in REPAIRS:
            raise InputError(f"prompt server.repair: got {repair!r:.40}; expected one of {', '.join(REPAIRS)}")
        if retrieval is not None and dynamic is None:
            raise InputError("prompt server.retrieval: got no dynamic library; expected one to link from")
        if substitute is not None and REPAIRS[repair] is prefix_caching:
            raise InputError("prompt server.substitute: got one with prefix_caching; expected None")
        self.backbone, self.static, self.dynamic, self.retrieval = backbone, static, dynamic, retrieval
        self.repair, self.budget = REPAIRS[repair], RepairBudget.of(budget)
        self.linker = Linker(backbone.fingerprint, static, dynamic)
        self._lead = None if substitute is None else lead_tokens(backbone, substitute)
        self._lead_digest = None if self._lead is None else lead_digest(backbone.fingerprint, self._lead)

    # ---------------------------------------------------------------------------------------------- what is kept

    def upload(self, name: str, content: Any, *, ttl: float | None = None, kv_ttl: float | None = None) -> Reference:
        """Puts a user's file under a name, with its canonical KV and encoder features (step 1 of the workflow).

        Args:
          content: as `StaticLibrary.put` takes it.
          ttl: seconds until the file expires. kv_ttl: seconds until its KV does, if sooner: the file is then computed
            again when it is next referred to.

        Raises:
          As `StaticLibrary.put` and `make_chunk`; nothing is kept then. With `kv_ttl` also as `ChunkStore.put`, after
          the file was put: its KV is computed when it is next referred to.
        """
        chunk = self._canonical(self._item(content))
        if kv_ttl is None:
            return self.static.put(name, content, chunk=chunk, ttl=ttl)
        # The library would bind the chunk's life to the file's.
        reference = self.static.put(name, content, ttl=ttl)
        self.static.store.put(chunk, ttl=kv_ttl)
        return reference

    def publish(self, name: str, content: Any, *, vector: Any = None) -> Reference:
        """Publishes the next version of an operator's reference with its canonical, and adds it to the retriever.

        Args:
          vector: by which it is found, [D]; None: the pooled features of its tower, or of its embeddings.

        Raises:
          InputError: there is no dynamic library. As `DynamicLibrary.publish` and `make_chunk`.
        """
        if self.dynamic is None:
            raise InputError("prompt server.publish: got no dynamic library; expected one")
        item = self._item(content)
        chunk = self._canonical(item)
        if vector is None:
            vector = pooled(np.asarray(self._embed(item, chunk.encoder).embeddings[0], np.float32))
        reference = self.dynamic.publish(name, content, chunk=chunk, vector=vector)
        if self.retrieval is not None:
            self.retrieval.retriever.add(str(dataclasses.replace(reference, version=None)), vector)
        return reference

    def _item(self, content: Any) -> Any:
        return Text(content) if isinstance(content, str) else one_form(content)

    def _embed(self, item: Any, encoder: Any) -> Tokens:
        prompt = self.backbone.prepare([item])
        return self.backbone.embed(**prompt) if encoder is None else self.backbone.embed(**prompt, features=encoder)

    def _canonical(self, item: Any, id: str | None = None, encoder: Any = None) -> Chunk:
        """Prefills a file alone or behind the substitute, under the id by which the linker asks for it."""
        chunk = make_chunk(self.backbone, [item], id, encoder=encoder, keep_encoder=True, lead=self._lead)
        # Behind a substitute the default id would be of both, but the name of the object says the lead already.
        if id is None and self._lead is not None:
            chunk = dataclasses.replace(chunk, id=chunk_id(self.backbone.fingerprint, item))
        return chunk

    # ---------------------------------------------------------------------------------------------------- answers

    def answer(self, prompt: str, steps: int, *, stop: Sequence[int] | None = None) -> LinkedAnswer:
        """Answers a prompt greedily.

        Chunks that are stored load while missing ones are computed (section 3.2). If that fails, the whole prompt is
        prefilled from its contents.

        Args:
          prompt: texts and references, which ends with a text.
          steps: tokens at most. stop: ids that end the answer; None: the backbone's.

        Raises:
          UnknownReferenceError: a reference that neither library has: of another user, expired, or never put.
          InputError: the prompt does not end with a text, or as the repair. Nothing is kept or changed then.
        """
        check_steps(steps)
        stops = tuple(getattr(self.backbone, "stop_tokens", ())) if stop is None else tuple(stop)
        with self.linker.link(prompt) as linked:
            segments = linked.segments
            if not segments or not isinstance(segments[-1], str) or not segments[-1].strip():
                raise InputError(f"prompt: got {prompt[-40:]!r} at its end; expected a text behind the last reference")
            layout, records = self.lay_out(linked)
            # The versions that were linked stay until the answer is there.
            return _Decoding(self, layout, records, steps, stops).run()

    def lay_out(
        self, linked: LinkedPrompt, start: int = 0, after: int = 0
    ) -> tuple[PromptLayout, list[LinkedChunkRecord]]:
        """Loads or computes the chunks of a linked prompt and lays it out; from its contents alone if that fails.

        Args:
          start: position of its first piece. after: decoded tokens in front of it, for the records.

        Raises:
          StoreError, InputError: chunks failed and one has no content.
        """
        requests = [dataclasses.replace(request, lead=self._lead_digest) for request in linked.requests]
        try:
            fetched = fetch(self.static.store, requests, self._compute) if requests else []
            return self._laid_out(linked, start, after, [(own.chunk, own.source) for own in fetched])
        except (StoreError, InputError):
            if any(chunk.resource.content is None for chunk in linked.chunks):
                raise
            failed: list[tuple[Chunk | None, Origin]] = [(None, PREFILLED)] * len(requests)
            return self._laid_out(linked, start, after, failed)

    def _compute(self, misses: Sequence[Miss]) -> list[Chunk]:
        return [self._canonical(miss.item, miss.request.id, miss.encoder()) for miss in misses]

    def _laid_out(
        self, linked: LinkedPrompt, start: int, after: int, chunks: Sequence[tuple[Chunk | None, Origin]]
    ) -> tuple[PromptLayout, list[LinkedChunkRecord]]:
        layout, records, rest = PromptLayout(self.backbone, start), [], iter(chunks)
        if not start and not isinstance(linked.segments[0], str):
            layout.add_first_tokens(next(segment for segment in linked.segments if isinstance(segment, str)))
        for segment in linked.segments:
            if isinstance(segment, str):
                layout.add_text(segment)
                continue
            chunk, origin = next(rest)
            layout.add_chunk(segment.resource.item, chunk, None if chunk is None else self._features(segment, chunk))
            records.append(LinkedChunkRecord(str(segment.resource.reference), origin, after))
        return layout, records

    def _features(self, segment: LinkedChunk, chunk: Chunk) -> Any:
        """Returns the tower's output of a chunk, kept beside its KV; None if it is gone, and the tower runs."""
        if chunk.encoder is not None:
            return chunk.encoder
        for store in (self.static.store, segment.store):
            output = None if store is None else store.get_encoder(chunk.id, chunk.backbone)
            if output is not None:
                return output
        return None


class _Decoding:
    """One answer while it is decoded: the cache, how much of it is used, and the next position."""

    def __init__(
        self, server: PromptServer, layout: PromptLayout, records: list[LinkedChunkRecord], steps: int, stops: Any
    ):
        self.server, self.backbone, self.retrieval = server, server.backbone, server.retrieval
        self.records, self.steps, self.stops = records, steps, stops
        self.repaired: list[Repaired] = []
        self.ids: list[int] = []
        self.used, self.next = 0, layout.start
        self.cache: dict[str, Array] = {}
        # New text and answer so far: what the retriever is asked with.
        self.read = [np.asarray(piece.tokens.embeddings[0], np.float32) for piece in layout.pieces if piece.kv is None]
        self.logits = self._serve(layout)

    def run(self) -> LinkedAnswer:
        """Decodes to the end; after every token the trigger is asked."""
        found = 0
        while len(self.ids) < self.steps:
            token = int(jnp.argmax(self.logits[0, -1]))
            self.ids.append(token)
            if token in self.stops or len(self.ids) == self.steps:
                break
            self._step(token)
            if self.retrieval is not None and found < self.retrieval.most and self.retrieval.trigger(self.ids):
                found += self._retrieve(self.retrieval)
        cache = {name: value[:, :, : self.used] for name, value in self.cache.items()}
        return LinkedAnswer(tuple(self.ids), tuple(self.records), tuple(self.repaired), cache)

    def _serve(self, layout: PromptLayout) -> Array:
        """Runs a prompt behind what is in the cache: spliced chunks mended, with its text, in one forward."""
        # A retrieved chunk may be the one with an answer's last tokens behind it, so room is for all steps.
        room, layout_ = self.steps, self.backbone.layout
        length = sum(piece.tokens.embeddings.shape[1] for piece in layout.pieces)
        pieces = layout.pieces
        if self.used and self.server.repair is prefix_caching:
            # Behind an answer's tokens no chunk is a prefix.
            pieces = [piece._replace(kv=None) for piece in pieces]
        if any(piece.kv is not None for piece in pieces):
            splice = splice_prompt(self.backbone, pieces)
            new: Any = splice.cache
        else:
            tokens = joined_tokens(*(piece.tokens for piece in pieces))
            context = {name: value[:, :, : self.used] for name, value in self.cache.items()} if self.used else None
            out = self.backbone.prefill(tokens, context)
            new, splice = to_engine(layout_, out.kv, tokens.positions, 0), None

        old = {name: value[:, :, : self.used] for name, value in self.cache.items()}
        cache = {}
        for name in layout_.names:
            parts = [old[name], new[name]] if self.used else [new[name]]
            cache[name] = jnp.pad(jnp.concatenate(parts, axis=2), [(0, 0), (0, 0), (0, room), (0, 0), (0, 0)])

        if splice is None:
            logits = out.logits
        else:
            whole: SplicedCache = splice.replace(cache=EngineKV(cache), slots=splice.slots + self.used)
            repaired = self.server.repair(self.backbone, whole, self.server.budget)
            if repaired.logits is None:
                name = getattr(self.server.repair, "__name__", "repair")
                raise InputError(
                    f"prompt server.repair: got {name}, which reads no last token; expected a whole prompt's"
                )
            self.repaired.append(repaired)
            cache, logits = repaired.cache, repaired.logits

        self.cache, self.used, self.next = dict(cache), self.used + length, layout.start
        return logits

    def _step(self, token: int) -> None:
        """Writes a decoded token and reads the next one's logits."""
        axes = self.backbone.layout.rope.axes
        places = np.full((1, 1) if axes is None else (1, 1, axes), self.next, np.int32)
        tokens = self.backbone.embed(input_ids=np.array([[token]], np.int32), position_ids=places)
        self.read.append(np.asarray(tokens.embeddings[0], np.float32))
        step = self.backbone.decode(tokens, self.cache, jnp.full((1, 1), self.used, jnp.int32))
        self.cache, self.logits = dict(step.cache), step.logits
        self.used, self.next = self.used + 1, self.next + 1

    def _retrieve(self, retrieval: RetrievalOptions) -> int:
        """Links the chunk that is nearest to the answer so far behind it. Returns how many there were."""
        vector = np.concatenate(self.read).mean(axis=0)
        vector = vector if retrieval.query is None else retrieval.query(vector)
        known = {record.reference.partition("@")[0] for record in self.records}
        names = [name for name in retrieval.retriever.search(vector, 1 + len(known))[0] if name not in known]
        if not names:
            return 0

        # The chunk first, then the text that decoding goes on from: the repair computes both in one forward.
        with self.server.linker.resolve(names[0]) as linked:
            layout, records = self.server.lay_out(linked, self.next, len(self.ids))
            before = len(layout.pieces)
            layout.add_text(retrieval.after)
            if len(layout.pieces) == before:
                raise InputError(f"retrieval.after: got {retrieval.after!r:.40}, without a token; expected one or more")
            self.records += records
            self.logits = self._serve(layout)
        return 1

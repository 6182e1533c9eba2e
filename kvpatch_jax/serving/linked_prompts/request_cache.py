"""VLCache's two caches: encoder output by the digest of a request's images, KV by the digest of each image.

Source: VLCache (Qin et al. 2025), sections 4.1 and 4.2.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from ...backbone import Backbone, Tokens, check_is_backbone
from ...cache import Chunk, Text, chunk_id, encoder_id, items_of, one_form, sort_of
from ...core import end_position
from ...errors import InputError
from ...patching import lead_digest, lead_tokens
from ...repair import PromptPiece, SplicedCache, behind_substitute, splice_prompt
from ...store import ChunkStore, Miss, Request, fetch

SUBSTITUTE = (Text("Please describe this image"),)
"""The paper's substitute prompt (section 3.2)."""
_MEDIA = {"image", "video", "audio"}
_TEXT_ARRAYS = ("input_ids", "position_ids", "attention_mask")


class CachedRequest(NamedTuple):
    """A request whose images came from the caches or went into them.

    Attributes:
      splice: the whole prompt with the images' KV spliced, for a repair.
      encoder: whether the tower ran ("computed") or its output was stored.
      images: where each image's KV came from, as `fetch` says.
    """

    splice: SplicedCache
    encoder: Literal["store", "computed"]
    images: tuple[str, ...]


class RequestCache:
    """Encoder cache by request and KV cache by image, over one tenant's store.

    KV is kept before RoPE, prefilled behind a substitute prompt, so that it does not depend on the request that an
    image first came with. The paper keeps a miss's KV as its own prompt left it in section 4.1, and KV behind an
    auxiliary prompt in sections 3.2 and 5.2; here it is always the latter, which has one provenance.

    Args:
      substitute: items in front of an image while its KV is made; needs at least one token.
      ttl: seconds that encoder outputs live; None: the store's default.

    Raises:
      InputError: a substitute without tokens.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: ChunkStore,
        substitute: Sequence[Any] | Tokens = SUBSTITUTE,
        ttl: float | None = None,
    ):
        check_is_backbone(backbone, "request cache")
        self.backbone, self.store, self.ttl = backbone, store, ttl
        self._substitute = lead_tokens(backbone, substitute)
        self._lead = lead_digest(backbone.fingerprint, self._substitute)
        self._lengths: dict[str, int] = {}

    def splice(self, items: Sequence[Any]) -> CachedRequest:
        """Prepares a request: encodes its images unless their output is stored, loads or computes each image's KV.

        Args:
          items: texts and images as `backbone.prepare` takes them; the last is a text.

        Raises:
          InputError: no image, or the last item is one; nothing is stored then. As `fetch`, `prepare`, `put_encoder`.
        """
        items = [one_form(item) for item in items_of(items, "request cache")]
        sorts = [sort_of(item) for item in items]
        if not _MEDIA & set(sorts) or sorts[-1] in _MEDIA:
            raise InputError(
                f"request cache: got items {sorts}; expected at least one image, video or sound, and a text at the end"
            )

        fingerprint = self.backbone.fingerprint
        prompt = self.backbone.prepare(items)
        request = encoder_id(fingerprint, {name: prompt[name] for name in prompt if name not in _TEXT_ARRAYS})
        features = self.store.get_encoder(request, fingerprint)
        origin: Literal["store", "computed"] = "computed" if features is None else "store"
        if features is None:
            features = self.backbone.encode(**prompt)
            assert features is not None
            self.store.put_encoder(request, fingerprint, features, ttl=self.ttl)
        tokens = self.backbone.embed(**prompt, features=features)

        spans = self._spans(items, sorts, tokens)
        ids = [chunk_id(fingerprint, item) for item, sort in zip(items, sorts, strict=True) if sort in _MEDIA]
        requests = [
            Request(id, fingerprint, item=tokens.take(*span), lead=self._lead)
            for id, span in zip(ids, spans, strict=True)
        ]
        fetched = fetch(self.store, requests, self._compute)

        pieces, end = [], 0
        for span, own in zip(spans, fetched, strict=True):
            if span[0] > end:
                pieces.append(PromptPiece(tokens.take(end, span[0])))
            kv = {name: jnp.asarray(value)[:, None] for name, value in own.chunk.kv.items()}
            pieces.append(PromptPiece(tokens.take(*span), kv))
            end = span[1]
        pieces.append(PromptPiece(tokens.take(end, tokens.embeddings.shape[1])))
        splice = splice_prompt(self.backbone, pieces)
        return CachedRequest(splice, origin, tuple(own.source for own in fetched))

    def _spans(self, items: Sequence[Any], sorts: Sequence[str], tokens: Tokens) -> list[tuple[int, int]]:
        """Returns the first and one past the last token of each image."""
        # A tokenizer's own first tokens stand in front of a prompt with a text, wherever the text stands.
        end = 0
        texts = [item for item, sort in zip(items, sorts, strict=True) if sort == "text"]
        if texts:
            end = self._count([texts[0]]) - self._text_tokens(texts[0])

        spans: list[tuple[int, int]] = []
        for item, sort in zip(items, sorts, strict=True):
            if sort in _MEDIA:
                id = chunk_id(self.backbone.fingerprint, item)
                if id not in self._lengths:
                    self._lengths[id] = self._count([item])
                spans.append((end, end + self._lengths[id]))
                end += self._lengths[id]
            else:
                end += self._text_tokens(item) if sort == "text" else len(item)
        if spans[-1][1] >= tokens.embeddings.shape[1]:
            raise InputError(f"request cache: got images at {spans} of a prompt; expected a text behind the last")
        return spans

    def _count(self, items: Sequence[Any]) -> int:
        return np.shape(self.backbone.prepare(items)["input_ids"])[1]

    def _text_tokens(self, text: Any) -> int:
        """Counts the tokens of a text without those that the tokenizer puts around it once."""
        return self._count([text, text]) - self._count([text])

    def _compute(self, misses: Sequence[Miss]) -> list[Chunk]:
        """Prefills images behind the substitute; their features are the request's, so that no tower runs again."""
        chunks = []
        for miss in misses:
            tokens: Tokens = miss.item
            places = np.asarray(tokens.positions)
            local = places - places.reshape(-1, *places.shape[2:]).min(axis=0)
            kv = behind_substitute(self.backbone, self._substitute, tokens._replace(positions=local))
            chunks.append(
                Chunk(
                    kv={name: value[:, 0] for name, value in kv.items()},
                    local=local[0],
                    span=int(np.floor(end_position(local)[0])) + 1,
                    length=local.shape[1],
                    id=miss.request.id,
                    layout=self.backbone.layout,
                    backbone=self.backbone.fingerprint,
                    content=miss.request.id,
                    lead=self._lead,
                )
            )
        return chunks

"""A store in memory that keeps canonicals of every encoding and lead, and patches of each base apart."""

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.store import PatchKey


class MemoryStore:
    """Keeps what it is given as it is; an encoded chunk under its own word."""

    def __init__(self):
        self.chunks, self.patches, self.encoders = {}, [], {}

    def put(self, chunk, *, encoding=None, ttl=None):
        chunk = chunk if encoding is None else kvp.encode_chunk(chunk, encoding)
        self.chunks[chunk.id, chunk.lead, chunk.encoding] = chunk

    def get(self, id, backbone, *, encoding=None, lead=None):
        return self.chunks.get((id, lead, encoding))

    def contains(self, id, backbone, *, encoding=None, lead=None):
        return (id, lead, encoding) in self.chunks

    def get_patches(self, served):
        served = served if isinstance(served, PatchKey) else PatchKey.of(served)
        found = [patch for patch in self.patches if patch.metadata.chunk.id == served.chunk]
        return [
            patch
            for patch in found
            if (patch.metadata.chunk.encoding, patch.metadata.orbit) == (served.encoding, served.orbit)
            and patch.metadata.antecedent.difference(served.antecedent, served.orbit) is None
        ]

    def put_patches(self, patches):
        self.patches += patches

    def may_have(self, id, backbone, *, encoding=None, lead=None):
        return self.contains(id, backbone, encoding=encoding, lead=lead)

    def put_encoder(self, id, backbone, output, *, ttl=None):
        self.encoders[id] = np.asarray(output)

    def amend_encoder(self, id, backbone, amend, *, ttl=None):
        self.put_encoder(id, backbone, amend([self.encoders[id]] if id in self.encoders else []))

    def get_encoder(self, id, backbone, *, tier=None):
        return None if tier == "remote" else self.encoders.get(id)

    def patch_count(self, id, backbone):
        return sum(patch.metadata.chunk.id == id for patch in self.patches)

    def encodings_of(self, id):
        return {encoding for own, lead, encoding in self.chunks if own == id and lead is None}

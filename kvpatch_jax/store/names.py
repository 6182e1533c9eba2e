"""Keyed names of a tenant's objects: `<chunk>/<part>`.

A name is a digest with the tenant's key: without the key, names reveal neither ids nor whether two tenants store the
same chunk. Parts: `kv` with the lead and the encoding, `enc`, `p.<served>.<form>`, and `e` of libraries' entries.
"""

import dataclasses
import functools
import hashlib
import json
from typing import Any, get_args

import jax

from ..cache import (
    AntecedentLike,
    Base,
    Patch,
    PatchMetadata,
    antecedent_of,
    digest_of,
    encoded,
    fingerprint_of,
)
from ..core import KVEncoding, RaggedFactors, is_low_rank, is_packed
from ..errors import InputError

Encoding = str | KVEncoding
"""Few bits that a canonical's KV is kept in: a `KVEncoding` or its word, such as "k4v4"."""


def encoding_word(encoding: Encoding | None) -> str | None:
    """Returns the word of an encoding in names: of "k4v4" that with its group; None for the canonical as prefilled.

    Raises:
      InputError: the encoding is unknown.
    """
    if encoding is None:
        return None
    try:
        return str(KVEncoding.of(encoding))
    except InputError:
        raise InputError(
            f"store.encoding: got {encoding!r:.80}; expected None, or a KVEncoding such as 'k4v4'"
        ) from None


@dataclasses.dataclass(frozen=True)
class PatchKey:
    """Key of the patches that serve a chunk behind an antecedent: fields of `ChunkKey` and `PatchMetadata`.

    Its representation contains no ids.

    Attributes:
      antecedent: chunks, ids or members before the chunk; `base_antecedent` likewise. If the content of a member is
        unknown, that of its stored canonical counts.
      content: content of the chunk to be patched; None: that of the stored canonical.
      lead: digest of the chunk's lead (`Chunk.lead`).
      encoding: encoding of the base that the patches were formed against (`Chunk.encoding`), such as "k4v4"; None: the
        KV as it was prefilled. Patches of another encoding are not found.
    """

    chunk: str = dataclasses.field(repr=False)
    backbone: str
    antecedent: AntecedentLike = dataclasses.field(repr=False)
    orbit: bool = False
    base: Base = "canonical"
    base_antecedent: AntecedentLike | None = dataclasses.field(default=None, repr=False)
    content: str | None = dataclasses.field(default=None, repr=False)
    lead: str | None = None
    encoding: Encoding | None = None

    def __post_init__(self) -> None:
        fingerprint_of(self.backbone, "served")
        if self.encoding is not None:
            try:
                object.__setattr__(self, "encoding", str(KVEncoding.of(self.encoding)))
            except InputError:
                raise InputError(
                    f"served.encoding: got {self.encoding!r:.80}; expected `Chunk.encoding`, such as 'k4v4'"
                ) from None
        fits = {
            "chunk": isinstance(self.chunk, str),
            "orbit": isinstance(self.orbit, bool),
            "base": self.base in get_args(Base),
            "lead": self.lead is None or isinstance(self.lead, str),
        }
        for name, fit in fits.items():
            if not fit:
                raise InputError(
                    f"served.{name}: got {getattr(self, name)!r:.80}; expected the type that `PatchKey` names"
                )

        object.__setattr__(self, "antecedent", antecedent_of(self.antecedent))
        if self.base_antecedent is not None:
            base = antecedent_of(self.base_antecedent, "base_antecedent")
            object.__setattr__(self, "base_antecedent", base)

    @classmethod
    def of(cls, metadata: PatchMetadata) -> "PatchKey":
        """Returns the key of a patch's metadata."""
        chunk = metadata.chunk
        return cls(
            chunk=chunk.id,
            backbone=chunk.backbone,
            antecedent=metadata.antecedent,
            orbit=metadata.orbit,
            base=metadata.base,
            base_antecedent=metadata.base_antecedent,
            content=chunk.content,
            lead=chunk.lead,
            encoding=chunk.encoding,
        )


class Names:
    """Namer of one tenant's objects.

    Args:
      tenant: owner of the objects.
      secret: at least 16 bytes, from which the tenant's key of names is derived.

    Attributes:
      tenant: keyed digest of the tenant, 24 hexadecimal digits.

    Raises:
      InputError: the tenant is empty, or the secret is too short.
    """

    def __init__(self, tenant: str, secret: bytes):
        if not isinstance(tenant, str) or not tenant:
            raise InputError(f"store: got tenant {tenant!r:.80}; expected a name")
        if not isinstance(secret, bytes) or len(secret) < 16:
            size = f"{len(secret)} bytes" if isinstance(secret, bytes) else type(secret).__name__
            raise InputError(f"store: got a secret of {size}; expected 16 bytes or more")
        self._key = bytes.fromhex(digest_of([b"tenant", encoded(tenant)], hashlib.blake2b(secret).digest()))
        self.tenant = self._digest(12, "tenant")
        self._chunks = functools.lru_cache(1024)(functools.partial(self._digest, 16, "chunk"))

    def __repr__(self) -> str:
        return f"Names({self.tenant})"

    def _digest(self, size: int, *fields: str) -> str:
        return digest_of([encoded(field) for field in fields], self._key, size)

    def chunk(self, backbone: str, id: str) -> str:
        """Names a chunk, 32 hexadecimal digits: the first part of the names of all of its objects.

        Raises:
          InputError: an argument of another type.
        """
        fingerprint_of(backbone, "store")
        if not isinstance(id, str):
            raise InputError(f"store: got an id of type {type(id).__name__}; expected a str, such as `chunk.id`")
        return self._chunks(backbone, id)

    def canonical(self, backbone: str, id: str, encoding: Encoding | None = None, lead: str | None = None) -> str:
        """Names a canonical. Each encoding, and each lead, has an object of its own.

        Raises:
          InputError: the encoding is unknown, or another argument of a wrong type.
        """
        if lead is not None and not isinstance(lead, str):
            raise InputError(f"store: got a lead of type {type(lead).__name__}; expected `Chunk.lead`, a str, or None")
        behind = "" if lead is None else f".b{self._digest(8, 'lead', lead)}"
        word = encoding_word(encoding)
        return f"{self.chunk(backbone, id)}/kv{behind}{'' if word is None else f'.{word}'}"

    def encoder(self, backbone: str, id: str) -> str:
        """Names an encoder output, by the id of its chunk."""
        return f"{self.chunk(backbone, id)}/enc"

    def entry(self, library: str, *fields: str, version: int | None = None) -> str:
        """Names a library's entry by the names of library and entry, and in a dynamic library by the version."""
        part = "e" if version is None else f"e.v{version:09d}"
        return f"{self._digest(16, 'entry', library, *fields)}/{part}"

    def patch(self, patch: Patch) -> str:
        """Names a patch by what it serves, then its ranks, layers, dtypes and contents."""
        form = json.dumps(_form(patch), sort_keys=True)
        return f"{self.patches(PatchKey.of(patch.metadata))}{self._digest(16, 'form', form)}"

    def patches(self, served: PatchKey) -> str:
        """Returns the prefix of the names of all patches with one key, of any ranks, layers, dtypes and contents."""
        base: Any = served.base_antecedent
        fields: list[Any] = [served.base, served.orbit, _served(served.antecedent, served.orbit)]
        fields += [None if base is None else _served(base), served.lead, served.encoding]
        return f"{self.chunk(served.backbone, served.chunk)}/p.{self._digest(16, 'served', json.dumps(fields))}."


def _form(patch: Patch) -> list:
    """Returns what distinguishes patches that serve the same chunk: ranks, layers, dtypes, contents and basis."""
    metadata = patch.metadata
    dtypes: list[tuple[str, list[str]]] = []
    for name, factors in patch.factors.items():
        # The directions of a patch in a shared basis belong to the basis.
        is_shared = metadata.basis is not None and is_low_rank(factors)
        words = []
        for leaf in jax.tree.leaves(factors[0] if is_shared else factors, is_leaf=is_packed):  # pyright: ignore
            words.append(_dtype_word(leaf))
        if isinstance(factors, RaggedFactors):
            # How many directions all layers have together; a checkpoint knows shapes alone.
            words.append(f"{factors.v.shape[0]}")
        dtypes.append((name, words))
    form = [sorted(patch.ranks.items()), metadata.layers, sorted(dtypes)]

    behind, base = metadata.antecedent, metadata.base_antecedent
    contents = [member.content for member in (behind.sorted() if metadata.orbit else behind).members]
    base_contents = [] if base is None else [member.content for member in base.members]
    if any(content is not None for content in contents + base_contents):
        form.append({"contents": [contents, base_contents]})
    if metadata.basis is not None:
        form.append({"basis": metadata.basis})
    return form


def _dtype_word(leaf: Any) -> str:
    if not is_packed(leaf):
        return str(leaf.dtype)
    return str(leaf.planes[0].dtype) if leaf.scaled else f"int{leaf.bits}g{leaf.group}"


def _served(antecedent: Any, orbit: bool = False) -> list[tuple[str, str]]:
    """Lists the ids and identities of an antecedent; sorted for an orbit patch, which serves every order."""
    served = [(member.id, member.identity or "") for member in antecedent.members]
    return sorted(served) if orbit else served

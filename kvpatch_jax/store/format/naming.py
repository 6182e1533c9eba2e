"""Names of a tenant's objects on the disk.

A name is a digest with the tenant's key: without the key, names reveal neither ids nor whether two tenants store the
same chunk.
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

from ...cache import (
    EXACT,
    Antecedent,
    AntecedentLike,
    Base,
    Member,
    Patch,
    PatchMetadata,
    antecedent_of,
    digest_of,
    encoded,
    fingerprint_of,
)
from ...core import KVEncoding, PatchFrame, Quantised, RaggedFactors, is_low_rank, is_packed
from ...errors import InputError, StoreCorruptError
from .known_words import expect_known

ENCODINGS: tuple[str, ...] = ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
"""Dtypes that kv can be stored in, beside the words of `KVEncoding`."""
Encoding = str | KVEncoding
"""Encoding of a canonical: a dtype of `ENCODINGS`, or few bits: a `KVEncoding` or its word, such as "k4v4"."""

_BYTES = 32
_KINDS: dict[str, Literal["kv", "patch", "encoder"]] = {"kv": "kv", "p": "patch", "enc": "encoder"}
_PATH = re.compile(
    r"(?:obj/[0-9a-f]{32}/[0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f]{64}\.(?:kv|enc|p)(?:\.[a-z0-9_]{1,40}){0,2}"
    r"|lib/[0-9a-f]{32}/(?:static/[0-9a-f]{2}/[0-9a-f]{64}\.entry|dynamic/[0-9a-f]{2}/[0-9a-f]{64}\.v[0-9]{9}))"
    r"\.safetensors"
)


def is_object(path: str) -> bool:
    """Returns whether a path below a root is that of an object or a library's entry."""
    return _PATH.fullmatch(path) is not None


def part_of(path: str) -> str:
    """Returns which part of its chunk an object is: "kv", "kv.int8", "enc", "p.…", "entry", "v000000001".

    A canonical behind a lead is "kv.behind_…" or "kv.behind_….int8".
    """
    return path.partition(".")[2].removesuffix(".safetensors")


_BEHIND = "behind_"
LEAD_NAME = re.compile(rf"{_BEHIND}[0-9a-f]+")
"""Word of a canonical's part that names its lead by a keyed digest."""


def unreduced_part(part: str) -> str:
    """Returns the part of the unreduced canonical with the same lead."""
    words = part.split(".")
    return ".".join(words[: 2 if len(words) > 1 and words[1].startswith(_BEHIND) else 1])


def encoding_in(part: str) -> Any:
    """Returns the encoding in a canonical's part, unchecked; None for the unreduced one."""
    return part[len(unreduced_part(part)) + 1 :] or None


def few_bits(word: str | None) -> KVEncoding | None:
    """Returns the few-bit encoding that a word in a name stands for; None for a dtype, None and unknown words."""
    try:
        encoding = None if word is None or word in ENCODINGS else KVEncoding.of(word)
    except InputError:
        return None
    return encoding if str(encoding) == word else None


def encoding_word(encoding: Encoding | None, what: str = "store.encoding") -> str | None:
    """Returns the word that an encoding has in names: of "k4v4" that with its group; None for the unreduced canonical.

    Raises:
      InputError: the encoding is unknown.
    """
    if encoding is None or (isinstance(encoding, str) and encoding in ENCODINGS):
        return encoding
    try:
        return str(KVEncoding.of(encoding))
    except InputError:
        raise InputError(
            f"{what}: got {encoding!r:.80}; expected None, one of {ENCODINGS}, or a KVEncoding such as 'k4v4'"
        ) from None


def expect_encoding(part: str) -> None:
    """Raises StoreCorruptError where a canonical's part names an unknown encoding."""
    word = encoding_in(part)
    if word is not None and few_bits(word) is None:
        expect_known("canonical of encoding", [word], ENCODINGS)


@dataclasses.dataclass(frozen=True)
class Name:
    """Path of an object below the store's root, `folder`/`file`, with the keyed name of its chunk."""

    folder: str
    chunk: str
    file: str
    kind: Literal["kv", "patch", "encoder", "entry"]

    @functools.cached_property
    def tenant(self) -> str:
        """Keyed name of the tenant."""
        return self.folder.split("/")[1]

    @functools.cached_property
    def path(self) -> str:
        """Path below the root, with forward slashes."""
        return f"{self.folder}/{self.file}"

    @functools.cached_property
    def part(self) -> str:
        """Which part of its chunk it is (`part_of`)."""
        return self.file.partition(".")[2].removesuffix(".safetensors")

    @functools.cached_property
    def chunk_key(self) -> str:
        """Key that is equal for all objects of one chunk (also `DirectoryEntry.chunk`)."""
        return f"{self.folder}/{self.chunk}"


def name_at(path: str) -> Name:
    """Parses an object's path below the root into its name.

    Raises:
      StoreCorruptError: it is no object's path.
    """
    if not is_object(path):
        raise StoreCorruptError(
            f"object: got path {path[:200]!r}; expected obj/tenant/backbone/xx/name.kind.safetensors or a library's"
        )
    above, _, file = path.rpartition("/")
    kind = "entry" if path.startswith("lib/") else _KINDS[file.split(".")[1]]
    return Name(above, file.partition(".")[0], file, kind)


@dataclasses.dataclass(frozen=True)
class PatchKey:
    """Key of the patches that serve a chunk behind an antecedent: fields of `PatchMetadata` with the same meaning.

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
    frame: PatchFrame = "phase_free"
    start: tuple[int, ...] | None = None
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
            "frame": self.frame in get_args(PatchFrame),
            "start": self.start is None or isinstance(self.start, tuple),
            "lead": self.lead is None or isinstance(self.lead, str),
        }

        for name, fit in fits.items():
            if not fit:
                raise InputError(
                    f"served.{name}: got {getattr(self, name)!r:.80}; expected the type of PatchMetadata.{name}"
                )

        object.__setattr__(self, "antecedent", antecedent_of(self.antecedent))
        if self.base_antecedent is not None:
            base = antecedent_of(self.base_antecedent, "base_antecedent")
            object.__setattr__(self, "base_antecedent", base)

    @property
    def behind(self) -> Antecedent:
        """Antecedent of the chunk, with states and contents as far as they are known."""
        return antecedent_of(self.antecedent)

    @property
    def base_behind(self) -> Antecedent | None:
        """Antecedent of the base; None for the canonical."""
        return None if self.base_antecedent is None else antecedent_of(self.base_antecedent)


@dataclasses.dataclass(frozen=True)
class ObjectNames:
    """Namer of one tenant's objects.

    Attributes:
      tenant: the tenant.
      secret: at least 16 bytes; the tenant's key is derived from it.

    Raises:
      InputError: the tenant is empty, or the secret is too short.
    """

    tenant: str = dataclasses.field(repr=False)
    secret: bytes = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.tenant, str) or not self.tenant:
            raise InputError(f"store: got tenant {self.tenant!r:.80}; expected a name")
        if not isinstance(self.secret, bytes) or len(self.secret) < 16:
            found = f"{len(self.secret)} bytes" if isinstance(self.secret, bytes) else type(self.secret).__name__
            raise InputError(f"store: got a secret of {found}; expected 16 bytes or more")

    @functools.cached_property
    def _key(self) -> bytes:
        return bytes.fromhex(digest_of([b"tenant", encoded(self.tenant)], hashlib.blake2b(self.secret).digest()))

    @functools.cached_property
    def _name(self) -> Callable[..., str]:
        """Function of bytes and fields that returns their keyed digest; the last ones are remembered."""
        return functools.lru_cache(1024)(self._digest)

    def _digest(self, size: int, *fields: str) -> str:
        return digest_of([encoded(field) for field in fields], self._key, size)

    def signature(self, *fields: str) -> str:
        """Returns a digest of fields that only a holder of the tenant's key of names can make."""
        return self._name(32, "signature", *fields)

    @functools.cached_property
    def space(self) -> str:
        """Directory of the tenant below the store's root."""
        return f"obj/{self._name(16, 'space')}"

    @property
    def tenant_name(self) -> str:
        """Keyed name of the tenant, with which its files in shared directories begin."""
        return self.space.removeprefix("obj/")

    def _place(self, backbone: str, chunk: str, rest: str, kind: Literal["kv", "patch", "encoder"]) -> Name:
        if not isinstance(backbone, str) or not backbone:
            fingerprint_of(backbone, "store")  # raises what is wrong
        if not isinstance(chunk, str):
            raise InputError(f"store: got an id of type {type(chunk).__name__}; expected a str, such as `chunk.id`")
        name = self._name(_BYTES, "chunk", backbone, chunk)
        folder = f"{self.space}/{self._name(16, 'backbone', backbone)}/{name[:2]}"
        return Name(folder, name, f"{name}.{rest}.safetensors", kind)

    def canonical(self, backbone: str, chunk: str, encoding: Encoding | None = None, lead: str | None = None) -> Name:
        """Names a canonical. Each encoding, and each lead, has an object of its own.

        Raises:
          InputError: the encoding is unknown.
        """
        if lead is not None and not isinstance(lead, str):
            raise InputError(f"store: got a lead of type {type(lead).__name__}; expected `Chunk.lead`, a str, or None")
        part = "kv" if lead is None else f"kv.{_BEHIND}{self._name(16, 'lead', lead)}"
        if encoding is not None:
            part = f"{part}.{encoding_word(encoding)}"
        return self._place(backbone, chunk, part, "kv")

    def canonicals(
        self, backbone: str, chunk: str, encodings: tuple[Encoding | None, ...], lead: str | None
    ) -> tuple[Name, ...]:
        """Names a canonical in several encodings, as `canonical`. The last names are remembered."""
        try:
            return self._known_canonicals(backbone, chunk, encodings, lead)
        except TypeError:  # what cannot be remembered is of a wrong type, which this names
            return self._canonicals(backbone, chunk, encodings, lead)

    @functools.cached_property
    def _known_canonicals(self) -> Callable[..., tuple[Name, ...]]:
        return functools.lru_cache(1024)(self._canonicals)

    def _canonicals(
        self, backbone: str, chunk: str, encodings: tuple[Encoding | None, ...], lead: str | None
    ) -> tuple[Name, ...]:
        return tuple([self.canonical(backbone, chunk, encoding, lead) for encoding in encodings])

    def encoder(self, backbone: str, chunk: str) -> Name:
        """Names an encoder output, by the id of its chunk (or an `encoder_id`)."""
        return self._place(backbone, chunk, "enc", "encoder")

    @property
    def libraries(self) -> str:
        """Directory of the tenant's libraries below the store's root."""
        return f"lib/{self.tenant_name}"

    def entry(self, library: str, *fields: str, version: int | None = None) -> Name:
        """Names a library's entry by the names of library and entry, and in a dynamic library by the version."""
        key = self._name(_BYTES, "entry", library, *fields)
        part = "entry" if version is None else f"v{version:09d}"
        return Name(f"{self.libraries}/{library}/{key[:2]}", key, f"{key}.{part}.safetensors", "entry")

    def patch(self, patch: Patch) -> Name:
        """Names a patch by chunk, backbone, antecedent (list, or set for an orbit patch), base, ranks and layers.

        Of the antecedent, the ids, states and known contents count.
        """
        form = json.dumps(_form(patch), sort_keys=True)
        served = self.patches(patch.metadata)
        return dataclasses.replace(served, file=f"{served.file}{self._name(20, 'form', form)}.safetensors")

    def patches(self, metadata: PatchKey | PatchMetadata) -> Name:
        """Returns the common prefix of all patches with one key, with any ranks, layers, dtypes and contents.

        Contents of antecedents are compared separately, if they are known. States are part of the name only if one is
        not exact, so that names of earlier versions, which had no states, stay valid.
        """
        members, base = _members(metadata.behind, metadata.orbit), metadata.base_behind
        before = None if base is None else _members(base)
        ids = None if before is None else [member.id for member in before]
        served: list[Any] = [metadata.base, metadata.orbit, [member.id for member in members], ids]
        served += [metadata.frame, metadata.start]

        states = [member.state for member in members]
        base_states = [member.state for member in before or ()]
        if any(state != EXACT for state in states + base_states):
            served.append({"states": [states, base_states]})
        if metadata.lead is not None:
            served.append({"lead": metadata.lead})
        if metadata.encoding is not None:
            served.append({"encoding": metadata.encoding})
        own = self._place(metadata.backbone, metadata.chunk, "p", "patch")
        return dataclasses.replace(own, file=f"{own.chunk}.p.{self._name(20, 'served', json.dumps(served))}.")


def _form(patch: Patch) -> list:
    metadata = patch.metadata
    dtypes: list[tuple[str, list[str]]] = []
    for name, factors in patch.factors.items():
        # A patch in a shared basis has no directions of its own.
        own: Any = factors if metadata.basis is None or not is_low_rank(factors) else factors[:1]  # pyright: ignore
        words = []
        for leaf in jax.tree.leaves(own, is_leaf=is_packed):
            words.append(f"int{leaf.bits}g{leaf.group}" if is_packed(leaf) else str(leaf.dtype))
        if isinstance(factors, RaggedFactors):
            # How many directions all layers have: an import knows shapes alone.
            words.append(f"{factors.v.values.shape[0] if isinstance(factors.v, Quantised) else factors.v.shape[0]}")
        dtypes.append((name, words))
    form = [sorted(patch.ranks.items()), metadata.layers, sorted(dtypes)]

    base = metadata.base_behind
    contents = [member.content for member in _members(metadata.behind, metadata.orbit)]
    base_contents = [] if base is None else [member.content for member in base.members]
    if any(content is not None for content in contents + base_contents):
        form.append({"contents": [contents, base_contents]})
    if metadata.basis is not None:
        form.append({"basis": metadata.basis})
    return form


def _members(antecedent: Antecedent, orbit: bool = False) -> list[Member]:
    def known(member):
        return (member.id, member.content or "", member.state)

    return sorted(antecedent.members, key=known) if orbit else list(antecedent.members)

"""Provenance: which KV a chunk has, and what it was conditioned on.

KV has an identity: the digest of its content, of how it was computed, and of the identities of the KV in front of it.
An antecedent is the KV in front of a chunk, in order. Windows, patches, stored prefills, engines and batches compare
identities, and nothing else, to tell what is exact, what survived a slide, and what is stale.
"""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from ..errors import InputError
from .chunk import Chunk, brief
from .ids import digest_of, encoded

Identities = tuple[str, ...]
"""Identities of the KV in front of a chunk, from the front."""
Likeness = Literal["mean", "near"]
"""What a stored prefill shares with a place beside the pinned lead: the nearest chunk, as the mean over several such
histories, or of one."""
Way = tuple[str, int]
"""How KV became approximate: an operating point and a rank, the key under which a certificate bounds the loss."""
Ways = tuple[Way, ...]
"""Distinct ways, sorted. None: the KV is what the model computes."""

BARE_WAYS: Ways = (("bare", 0),)
SURVIVOR_WAYS: Ways = (("survivor", 0),)
"""Ways of a survivor in a window that forgets."""
UNKNOWN: Way = ("", 0)
"""Way of what is of unknown origin. Nothing bounds it."""
UNKNOWN_WAYS: Ways = (UNKNOWN,)
MOST_WAYS = 8
"""Ways that one chunk keeps apart. Of more than that nothing is known."""

_IDENTITY = re.compile("[0-9a-f]{32}")
_SHOWN = 8


# ----------------------------------------------------------------------------------------------------------- identities


def text_digest(text: str) -> str:
    """Digests a text: 32 hexadecimal digits."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@functools.lru_cache(maxsize=1 << 14)
def identity(content: str, method: str = "prefill", front: Identities = ()) -> str:
    """Computes the identity of a chunk's KV.

    Args:
      content: digest of what the chunk shows, or its name where that is unknown.
      method: "prefill", or any other way of making KV with the digest of what it was made of ("patch 3fa…").
      front: identities of the KV that it was conditioned on, in order.
    """
    return text_digest(f"{''.join(front)}\0{content}\0{method}")


def prefilled(contents: Iterable[str], front: Identities = ()) -> Identities:
    """Returns the identities of chunks that are prefilled one behind the other, and behind `front`."""
    # As `identity`, in linear time: a prompt may have thousands of chunks.
    identities, seen = list(front), blake2b("".join(front).encode(), digest_size=16)
    for content in contents:
        digest = seen.copy()
        digest.update(f"\0{content}\0prefill".encode("utf-8", "surrogatepass"))
        identities.append(digest.hexdigest())
        seen.update(identities[-1].encode())
    return tuple(identities)


@functools.lru_cache(maxsize=1 << 10)  # an engine asks it of fronts of thousands of chunks
def slides(seen: Identities, front: Identities) -> int | None:
    """Counts what has left since KV was computed: None if what is in front now is no part, in order, of what was.

    Args:
      seen: identities that the KV was conditioned on.
      front: identities in front of it now.
    """
    remaining = iter(seen)
    return len(seen) - len(front) if all(member in remaining for member in front) else None


def likeness_keys(lead: Identities, nearest: str) -> dict[Likeness, str]:
    """Returns the keys under which a stored prefill is found behind other chunks, the most alike first.

    Args:
      lead: identities of the pinned lead in front of it.
      nearest: content of the chunk directly in front of it.
    """
    pinned = "/".join(lead)
    return {likeness: text_digest(f"{likeness}\0{pinned}\0{nearest}") for likeness in ("mean", "near")}


def merged(first: Ways, second: Ways) -> Ways:
    """Returns the ways of either; the unknown one alone where it is among them, because nothing else matters then."""
    if not second or first == UNKNOWN_WAYS:
        return first
    together = {*first, *second}
    known = UNKNOWN not in together and len(together) <= MOST_WAYS
    return tuple(sorted(together)) if known else UNKNOWN_WAYS


def contents_differ(first: str | None, second: str | None) -> bool:
    """Returns whether two digests are of different contents. An unknown one (None) is taken on trust."""
    return first is not None and second is not None and first != second


# ---------------------------------------------------------------------------------------------------------- antecedents


class Member(NamedTuple):
    """One chunk of an antecedent.

    Attributes:
      id: the chunk's name.
      content: the digest of what it shows (`Chunk.content`); None where it is unknown.
      identity: of its KV; None: that of a prefill behind exactly the members in front of it, all of them so.
    """

    id: str
    content: str | None = None
    identity: str | None = None


@dataclasses.dataclass(frozen=True)
class Antecedent:
    """The chunks that precede a chunk, in order, each with its content and the identity of its KV.

    `Antecedent.of` checks its members.
    """

    members: tuple[Member, ...] = ()

    @classmethod
    def of(cls, *members: "str | Chunk | Member") -> "Antecedent":
        """Lists an antecedent's chunks, in order.

        Args:
          members: ids (content unknown, prefilled), chunks (their content, prefilled), or members.

        Raises:
          InputError: anything else.
        """
        return antecedent_of(members)

    @classmethod
    def at(cls, chunks: Iterable[tuple[str, str | None]], identities: Identities) -> "Antecedent":
        """Lists chunks, each an id and a content, whose KV has these identities."""
        members, expected, exact = [], (), True
        for (id, content), kv in zip(chunks, identities, strict=True):
            expected = (*expected, identity(id if content is None else content, "prefill", expected))
            exact = exact and kv == expected[-1]
            members.append(Member(id, content, None if exact else kv))
        return cls(tuple(members))

    @functools.cached_property
    def ids(self) -> tuple[str, ...]:
        """The chunks' names, in order."""
        return tuple(member.id for member in self.members)

    @functools.cached_property
    def identities(self) -> Identities:
        """The identities of the chunks' KV, in order."""
        front: Identities = ()
        for id, content, kv in self.members:
            front = (*front, identity(id if content is None else content, "prefill", front) if kv is None else kv)
        return front

    @property
    def exact(self) -> bool:
        """Whether every chunk's KV is that of a prefill behind those in front of it."""
        return all(member.identity is None for member in self.members)

    @property
    def digest(self) -> str:
        """Digest of ids, contents and identities in their order: 32 hexadecimal digits."""
        fields = [b"antecedent"]
        for id, content, kv in self.members:
            # An unknown content is another field than any content, the empty one included.
            shown = [b""] if content is None else [b"content", encoded(content)]
            fields += [b"member", encoded(id), *shown, encoded(kv or "exact")]
        return digest_of(fields, size=16)

    def sorted(self) -> "Antecedent":
        """Sorts the members by id: the set that an orbit patch serves every order of.

        Raises:
          InputError: some members that are exact and some that are not, which is possible in some orders only.
        """
        if not self.exact and any(member.identity is None for member in self.members):
            raise InputError(
                f"antecedent: got some exact members and some that are not among {self.shown}; expected a set whose "
                "members are all exact, or none of them"
            )
        return Antecedent(
            tuple(sorted(self.members, key=lambda member: (member.id, member.content or "", member.identity or "")))
        )

    @property
    def shown(self) -> str:
        """The ids as messages list them: the first ones of many."""
        ids = self.ids
        return str(ids) if len(ids) <= _SHOWN else f"{str(ids[:_SHOWN])[:-1]}, … of {len(ids)})"

    def difference(self, other: "Antecedent", orbit: bool = False) -> str | None:
        """Describes how this antecedent differs from another; returns None where they are equal.

        Ids and identities must be equal, contents where both are known; the order counts unless `orbit`.

        Returns:
          A clause of an error's message: what this is, and what was expected.
        """
        # A wrong order is told from other chunks, because it calls for another remedy: an orbit patch.
        ids, others = self.ids, other.ids
        if ids != others:
            same_set = Counter(ids) == Counter(others)
            if not orbit or not same_set:
                return f"{'the order ' if same_set else ''}{self.shown}; expected {other.shown}"
        pairs = _paired(self, other) if orbit else zip(self.members, other.members, strict=True)

        # A content that one side does not know matches any.
        for member, expected in pairs:
            if contents_differ(member.content, expected.content):
                return f"{brief(member.id)!r} with content {member.content!r}; expected content {expected.content!r}"
            if member.identity != expected.identity:
                return (
                    f"{brief(member.id)!r} with KV {member.identity or 'of a prefill there'}; expected "
                    f"{expected.identity or 'that of a prefill there'}"
                )
        return None


def _paired(first: Antecedent, second: Antecedent) -> list[tuple[Member, Member]]:
    """Pairs the members of two orders of one set, such that as few as possible differ."""
    pairs, remaining = [], list(second.members)
    # A member of unknown content matches any of its id, so it takes what the others leave.
    for member in sorted(first.members, key=lambda member: member.content is None):
        nearest = min(remaining, key=functools.partial(_unlikeness, member))
        remaining.remove(nearest)
        pairs.append((member, nearest))
    return pairs


def _unlikeness(first: Member, second: Member) -> tuple[bool, ...]:
    """Ranks how much two members differ, equal ones first."""
    content = contents_differ(first.content, second.content)
    return first.id != second.id, first.identity != second.identity, content, first.content != second.content


_NO_ANTECEDENT = Antecedent()

AntecedentLike = Iterable[str | Chunk | Member] | Antecedent
"""An antecedent as public functions take it: names, chunks or members, in order."""


def antecedent_of(members: Iterable[Any] | Antecedent, what: str = "antecedent") -> Antecedent:
    """Returns the `Antecedent` of any `AntecedentLike`. `what` begins messages.

    Raises:
      InputError: a single name, chunk or member in place of a sequence, or a member of another type.
    """
    if isinstance(members, Antecedent):
        return members
    if isinstance(members, tuple) and not members:
        return _NO_ANTECEDENT
    # A Member is a tuple, and a str a sequence of letters: each would pass for a sequence of names.
    if isinstance(members, str | bytes | Chunk | Member):
        shown = f"{members[:40]!r}" if isinstance(members, str | bytes) else f"a {type(members).__name__}"
        raise InputError(f"{what}: got {shown}; expected a sequence of names, chunks or members, such as [{shown}]")
    # Sets and mappings have no order that a later process would find again.
    if not isinstance(members, Iterable) or isinstance(members, Set | Mapping):
        raise InputError(f"{what}: got a {type(members).__name__}; expected a sequence of names, chunks or members")

    listed: list[Member] = []
    approximate: Member | None = None
    for member in members:
        if isinstance(member, Chunk):
            member = Member(member.id, member.content)
        elif isinstance(member, str):
            member = Member(member)
        if not isinstance(member, Member) or not isinstance(member.id, str):
            expected = "every one as a str, a Chunk or a Member with a str for its id"
            raise InputError(f"{what}: got a {type(member).__name__} among the names; expected {expected}")
        id, content, kv = member
        if content is not None and (not isinstance(content, str) or not content):
            raise InputError(f"{what}: got {brief(id)!r} of content {content!r}; expected a digest, or None")
        if kv is not None and (not isinstance(kv, str) or _IDENTITY.fullmatch(kv) is None):
            raise InputError(
                f"{what}: got {brief(id)!r} of identity {kv!r:.80}; expected 32 hexadecimal digits, or None"
            )
        if kv is None and approximate is not None:
            raise InputError(
                f"{what}: got {brief(id)!r} prefilled behind {brief(approximate.id)!r}, which is not exact; expected "
                "the identity of its KV"
            )
        approximate = approximate if kv is None else member
        listed.append(member)
    return Antecedent(tuple(listed))

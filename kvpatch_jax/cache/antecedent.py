"""What stands in front of a chunk: which chunks, in which order, and how each of them was served.

KV of a chunk depends on all three. A patch that was formed behind an antecedent served blind is not the one formed
behind the true antecedent, though the ids are the same; nor is one formed behind the same id with other content.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..errors import InputError
from .chunk import Chunk, brief
from .chunk_ids import digest_of, encoded

EXACT = "exact"
"""The state of a chunk that was prefilled behind exactly those in front of it, all of them exact."""

_STATE = re.compile(r"exact|[a-z]+:[0-9a-f]{32}")
_SHOWN = 8


class Member(NamedTuple):
    """One chunk of an antecedent.

    Attributes:
      id: the chunk's name.
      content: the digest of what it shows (`Chunk.content`); None where nobody said.
      state: how it was served: "exact", or a word and a digest of 32 hexadecimal digits ("bare:…", "patched:…",
        "survivor:…", "approximate:…").
    """

    id: str
    content: str | None = None
    state: str = EXACT


@dataclasses.dataclass(frozen=True)
class Antecedent:
    """The chunks in front of a chunk, in order, each with its content and with how it was served.

    Raises:
      InputError: members that are none, an empty content, a state that is no such word and digest, or a member that
        claims to be exact behind one that is not.
    """

    members: tuple[Member, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.members, tuple):
            raise InputError(f"antecedent: members {self.members!r:.80}; expected a tuple, each a Member")
        approximate: Member | None = None
        for member in self.members:
            _check_member(member)
            if member.state != EXACT:
                approximate = approximate or member
            elif approximate is not None:
                raise InputError(
                    f"antecedent: {brief(member.id)!r} served {EXACT!r} behind {brief(approximate.id)!r} served "
                    f"{approximate.state!r}; expected a state that says what it was conditioned on"
                )

    @classmethod
    def of(cls, *things: "str | Chunk | Member") -> "Antecedent":
        """Lists what stands in front, in order.

        Args:
          things: ids (content unknown, served exactly), chunks (their content, served exactly), or members.

        Raises:
          InputError: anything else.
        """
        return antecedent_of(things)

    @property
    def ids(self) -> tuple[str, ...]:
        """The chunks' names, in order."""
        return tuple(member.id for member in self.members)

    @property
    def exact(self) -> bool:
        """Whether every chunk was served exactly."""
        return all(member.state == EXACT for member in self.members)

    @property
    def plain(self) -> bool:
        """Whether the ids say all that is known: no content, and all served exactly."""
        return all(member == Member(member.id) for member in self.members)

    @property
    def digest(self) -> str:
        """Digests ids, contents and states in their order: 32 hexadecimal digits, equal where all of them are."""
        fields = [b"antecedent"]
        for member in self.members:
            content = [b""] if member.content is None else [b"content", encoded(member.content)]
            fields += [b"member", encoded(member.id), *content, encoded(member.state)]
        return digest_of(fields, size=16)

    def sorted(self) -> "Antecedent":
        """Sorts the members by id: the set that an orbit patch serves every order of.

        Raises:
          InputError: some members that are exact and some that are not, which is so in some orders only.
        """
        if not self.exact and any(member.state == EXACT for member in self.members):
            raise InputError(
                f"antecedent: served {tuple(member.state for member in self.members)}; expected a set whose members "
                f"are all {EXACT!r}, or none of them"
            )
        return Antecedent(
            tuple(sorted(self.members, key=lambda member: (member.id, member.content or "", member.state)))
        )

    @property
    def shown(self) -> str:
        """The ids as messages list them, the first ones of many."""
        ids = self.ids
        return str(ids) if len(ids) <= _SHOWN else f"{str(ids[:_SHOWN])[:-1]}, … of {len(ids)})"

    def difference(self, wanted: "Antecedent", orbit: bool = False) -> str | None:
        """Says in what another antecedent differs from this one, or returns None where it does not.

        Ids and states must be equal, contents where both are known; the order counts unless `orbit`.

        Returns:
          A clause of an error's message: what this is, and what was expected.
        """
        ids, others = self.ids, wanted.ids
        if Counter(ids) != Counter(others) or (not orbit and ids != others):
            what = "the order " if Counter(ids) == Counter(others) else ""
            return f"{what}{self.shown}; expected {wanted.shown}"
        return _unlike_set(self, wanted) if orbit else _unlike_members(self, wanted)


def _check_member(member: Any) -> None:
    if not isinstance(member, Member) or not isinstance(member.id, str):
        raise InputError(f"antecedent: {member!r:.80}; expected a Member with a str for its id")
    if member.content is not None and (not isinstance(member.content, str) or not member.content):
        raise InputError(f"antecedent: {brief(member.id)!r} of content {member.content!r}; expected a digest, or None")
    if not isinstance(member.state, str) or _STATE.fullmatch(member.state) is None:
        raise InputError(
            f"antecedent: {brief(member.id)!r} served {member.state!r:.80}; expected 'exact', or a word, a colon and "
            "32 hexadecimal digits"
        )


def _unlike_members(found: Antecedent, wanted: Antecedent) -> str | None:
    for own, other in zip(found.members, wanted.members, strict=True):
        if None not in (own.content, other.content) and own.content != other.content:
            return f"{brief(own.id)!r} with content {own.content!r}; expected content {other.content!r}"
        if own.state != other.state:
            return f"{brief(own.id)!r} as it was served {own.state!r}; expected it served {other.state!r}"
    return None


def _unlike_set(found: Antecedent, wanted: Antecedent) -> str | None:
    """As `_unlike_members`, of members in any order: within one id, an unknown content stands for any."""
    for id in dict.fromkeys(found.ids):
        own, other = ([member for member in each.members if member.id == id] for each in (found, wanted))
        states, expected = (Counter(member.state for member in each) for each in (own, other))
        if states != expected:
            return f"{brief(id)!r} as it was served {sorted(states)}; expected it served {sorted(expected)}"
        for state in states:
            known, wanted_known = (
                Counter(member.content for member in each if member.state == state and member.content is not None)
                for each in (own, other)
            )
            unknown = states[state] - wanted_known.total()
            if (known - wanted_known).total() > unknown:
                return f"{brief(id)!r} with content {sorted(known)}; expected content {sorted(wanted_known)}"
    return None


AntecedentLike = Sequence[str | Chunk | Member] | Antecedent
"""What public functions take as an antecedent."""


def antecedent_of(things: Iterable[Any] | Antecedent, what: str = "antecedent") -> Antecedent:
    """Lists what stands in front, of any form that an argument `antecedent` may have. `what` begins messages.

    Raises:
      InputError: one thing in place of a sequence (a str, a chunk, a member), or a thing of another kind.
    """
    if isinstance(things, Antecedent):
        return things
    if isinstance(things, str | bytes | Chunk | Member):
        shown = f"{things[:40]!r}" if isinstance(things, str | bytes) else f"a {type(things).__name__}"
        raise InputError(f"{what}: {shown}; expected a sequence of names, chunks or members, such as [{shown}]")
    if not isinstance(things, Iterable):
        raise InputError(f"{what}: a {type(things).__name__}; expected a sequence of names, chunks or members")
    members = []
    for thing in things:
        if isinstance(thing, Chunk):
            thing = Member(thing.id, thing.content)
        elif isinstance(thing, str):
            thing = Member(thing)
        if not isinstance(thing, Member):
            raise InputError(
                f"{what}: a {type(thing).__name__} among the names; expected every one as a str, a Chunk or a Member"
            )
        members.append(thing)
    return Antecedent(tuple(members))

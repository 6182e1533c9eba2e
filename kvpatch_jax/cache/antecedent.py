"""The antecedent of a chunk: the chunks that precede it, in order, and how each of them was served.

KV of a chunk depends on all three. A patch formed after an antecedent that was served blind differs from one formed
after the true antecedent, though the ids are the same; so does one formed after the same id with other content.
"""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..errors import InputError
from .chunk import Chunk, brief
from .chunk_ids import digest_of, encoded

EXACT = "exact"
"""The state of a chunk whose KV is that of a prefill after exactly the chunks that precede it, all of them exact."""

_STATE = re.compile(r"exact|[a-z]+:[0-9a-f]{32}")
_SHOWN = 8


class Member(NamedTuple):
    """One chunk of an antecedent.

    Attributes:
      id: the chunk's name.
      content: the digest of what it shows (`Chunk.content`); None where it is unknown.
      state: how it was served: "exact", or a word and a digest of 32 hexadecimal digits ("bare:…", "patched:…",
        "survivor:…", "approximate:…").
    """

    id: str
    content: str | None = None
    state: str = EXACT


@dataclasses.dataclass(frozen=True)
class Antecedent:
    """The chunks that precede a chunk, in order, each with its content and state.

    Raises:
      InputError: a member of another type, an empty content, a state that is no such word and digest, or an exact
        member after one that is not exact.
    """

    members: tuple[Member, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.members, tuple):
            raise InputError(f"antecedent: got members {self.members!r:.80}; expected a tuple, each a Member")

        # The first member that is not exact: whatever follows was conditioned on it, so it is not exact either.
        approximate: Member | None = None
        for member in self.members:
            if not isinstance(member, Member) or not isinstance(member.id, str):
                raise InputError(f"antecedent: got {member!r:.80}; expected a Member with a str for its id")

            id, content, state = member
            if content is not None and (not isinstance(content, str) or not content):
                raise InputError(f"antecedent: got {brief(id)!r} of content {content!r}; expected a digest, or None")
            if state == EXACT:
                if approximate is not None:
                    raise InputError(
                        f"antecedent: got {brief(id)!r} served {EXACT!r} behind {brief(approximate.id)!r} served "
                        f"{approximate.state!r}; expected a state that says what it was conditioned on"
                    )
                continue
            if not isinstance(state, str) or _STATE.fullmatch(state) is None:
                raise InputError(
                    f"antecedent: got {brief(id)!r} served {state!r:.80}; expected 'exact', or a word, a colon and 32 "
                    "hexadecimal digits"
                )
            approximate = approximate or member

    @classmethod
    def of(cls, *members: "str | Chunk | Member") -> "Antecedent":
        """Lists an antecedent's chunks, in order.

        Args:
          members: ids (content unknown, served exactly), chunks (their content, served exactly), or members.

        Raises:
          InputError: anything else.
        """
        return antecedent_of(members)

    @functools.cached_property
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
        """Digest of ids, contents and states in their order: 32 hexadecimal digits, equal where all of them are."""
        fields = [b"antecedent"]
        for member in self.members:
            # An unknown content is another field than any content, the empty one included.
            content = [b""] if member.content is None else [b"content", encoded(member.content)]
            fields += [b"member", encoded(member.id), *content, encoded(member.state)]
        return digest_of(fields, size=16)

    def sorted(self) -> "Antecedent":
        """Sorts the members by id: the set that an orbit patch serves every order of.

        Raises:
          InputError: some members that are exact and some that are not, which is possible in some orders only.
        """
        if not self.exact and any(member.state == EXACT for member in self.members):
            raise InputError(
                f"antecedent: got members served {tuple(member.state for member in self.members)}; expected a set "
                f"whose members are all {EXACT!r}, or none of them"
            )
        return Antecedent(
            tuple(sorted(self.members, key=lambda member: (member.id, member.content or "", member.state)))
        )

    @property
    def shown(self) -> str:
        """The ids as messages list them: the first ones of many."""
        ids = self.ids
        return str(ids) if len(ids) <= _SHOWN else f"{str(ids[:_SHOWN])[:-1]}, … of {len(ids)})"

    def difference(self, wanted: "Antecedent", orbit: bool = False) -> str | None:
        """Describes how this antecedent differs from another; returns None where they are equal.

        Ids and states must be equal, contents where both are known; the order counts unless `orbit`.

        Returns:
          A clause of an error's message: what this is, and what was expected.
        """
        ids, others = self.ids, wanted.ids
        # A wrong order is told from other chunks, because it calls for another remedy: an orbit patch.
        if ids != others:
            same_set = Counter(ids) == Counter(others)
            if not orbit or not same_set:
                return f"{'the order ' if same_set else ''}{self.shown}; expected {wanted.shown}"

        if orbit:
            return _set_difference(self, wanted)

        # A content that one side does not know matches any.
        for own, other in zip(self.members, wanted.members, strict=True):
            if None not in (own.content, other.content) and own.content != other.content:
                return f"{brief(own.id)!r} with content {own.content!r}; expected content {other.content!r}"
            if own.state != other.state:
                return f"{brief(own.id)!r} as it was served {own.state!r}; expected it served {other.state!r}"

        return None


def _set_difference(found: Antecedent, wanted: Antecedent) -> str | None:
    """Compares members in any order: within one id, an unknown content matches any."""
    for id in dict.fromkeys(found.ids):
        own = [member for member in found.members if member.id == id]
        other = [member for member in wanted.members if member.id == id]
        states, expected = Counter(member.state for member in own), Counter(member.state for member in other)
        if states != expected:
            return f"{brief(id)!r} as it was served {sorted(states)}; expected it served {sorted(expected)}"

        for state in states:
            known, known_wanted = _contents(own, state), _contents(other, state)
            # Members of `wanted` without a known content match as many of `found` as there are.
            unknown = states[state] - known_wanted.total()
            if (known - known_wanted).total() > unknown:
                return f"{brief(id)!r} with content {sorted(known)}; expected content {sorted(known_wanted)}"
    return None


def _contents(members: list[Member], state: str) -> Counter[str]:
    """Counts the known contents of the members in one state."""
    return Counter(member.content for member in members if member.state == state and member.content is not None)


_NO_ANTECEDENT = Antecedent()

AntecedentLike = Sequence[str | Chunk | Member] | Antecedent
"""An antecedent as public functions take it: names, chunks or members, in order."""


def antecedent_of(members: Iterable[Any] | Antecedent, what: str = "antecedent") -> Antecedent:
    """Returns the `Antecedent` of any `AntecedentLike`. `what` begins messages.

    Raises:
      InputError: a single name, chunk or member in place of a sequence, or a member of another type.
    """
    if isinstance(members, Antecedent):
        return members
    if members == ():
        return _NO_ANTECEDENT
    # A Member is a tuple, and a str a sequence of letters: each would pass for a sequence of names.
    if isinstance(members, str | bytes | Chunk | Member):
        shown = f"{members[:40]!r}" if isinstance(members, str | bytes) else f"a {type(members).__name__}"
        raise InputError(f"{what}: got {shown}; expected a sequence of names, chunks or members, such as [{shown}]")
    if not isinstance(members, Iterable):
        raise InputError(f"{what}: got a {type(members).__name__}; expected a sequence of names, chunks or members")

    listed = []
    for member in members:
        if isinstance(member, Chunk):
            member = Member(member.id, member.content)
        elif isinstance(member, str):
            member = Member(member)

        if not isinstance(member, Member):
            raise InputError(
                f"{what}: got a {type(member).__name__} among the names; expected every one as a str, a Chunk or a "
                "Member"
            )
        listed.append(member)

    return Antecedent(tuple(listed))

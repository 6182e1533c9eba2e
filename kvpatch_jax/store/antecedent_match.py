"""Which of the stored patches that share ids were formed behind the antecedents that are asked for."""

from collections.abc import Callable, Sequence

from ..cache import Antecedent, PatchMetadata
from .format.naming import PatchKey


def serving(
    found: Sequence[PatchMetadata], served: PatchKey | PatchMetadata, stored: Callable[[str], set[str | None]]
) -> list[bool]:
    """Tells of each stored patch whether its antecedents are those asked for, so far as contents are known.

    Where a content is not said, that of the id's stored canonical counts; without one, that of the patches if they
    agree. If not, none of those that state one serves: nothing says which is meant.

    Args:
      found: metadata of patches of one name (`Names.patches`).
      stored: gives the contents that an id's canonicals state.
    """
    wanted, formed = _parts(served), [_parts(metadata) for metadata in found]
    unknown = {member.id for part in wanted for member in part.members if member.content is None}
    stated: dict[str, set[str]] = {}
    for member in (member for parts in formed for part in parts for member in part.members):
        if member.id in unknown and member.content is not None:
            stated.setdefault(member.id, set()).add(member.content)

    meant = {id: _one_of(stored(id), contents) for id, contents in stated.items()}
    wanted = [_with_contents(part, meant) for part in wanted]
    unsettled = {id for id, content in meant.items() if content is None}
    return [
        not any(_states(part, unsettled) for part in parts) and _agree(parts, wanted, metadata.orbit)
        for metadata, parts in zip(found, formed, strict=True)
    ]


def _parts(each: PatchKey | PatchMetadata) -> list[Antecedent]:
    base = each.base_behind
    return [each.behind] if base is None else [each.behind, base]


def _one_of(stored: set[str | None], formed: set[str]) -> str | None:
    contents = {content for content in stored if content is not None} or formed
    return next(iter(contents)) if len(contents) == 1 else None


def _with_contents(antecedent: Antecedent, contents: dict[str, str | None]) -> Antecedent:
    return Antecedent(
        tuple(
            member._replace(content=contents[member.id]) if member.content is None and member.id in contents else member
            for member in antecedent.members
        )
    )


def _states(antecedent: Antecedent, ids: set[str]) -> bool:
    return any(member.id in ids and member.content is not None for member in antecedent.members)


def _agree(formed: list[Antecedent], wanted: list[Antecedent], orbit: bool) -> bool:
    if len(formed) != len(wanted):
        return False
    return all(
        own.difference(other, orbit and place == 0) is None
        for place, (own, other) in enumerate(zip(formed, wanted, strict=True))
    )

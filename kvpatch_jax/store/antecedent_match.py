"""Selection of the stored patches whose antecedents are the requested ones.

Patches that share a name agree in the ids of their antecedents; here the contents are compared as well.
"""

from collections.abc import Callable, Sequence

from ..cache import Antecedent, PatchMetadata
from .format.naming import PatchKey


def match_antecedents(
    stored: Sequence[PatchMetadata], key: PatchKey | PatchMetadata, contents: Callable[[str], set[str | None]]
) -> list[bool]:
    """Returns for each stored patch whether its antecedents are those of the key, as far as contents are known.

    If the key does not state the content of an id, that of the id's stored canonical counts; if there is none, the
    content that the patches agree on. If they disagree, no patch that states one matches: it is unknown which is meant.

    Args:
      stored: metadata of patches with one name (`ObjectNames.patches`).
      contents: returns the contents that an id's stored canonicals state.
    """
    wanted, formed = _antecedents(key), [_antecedents(metadata) for metadata in stored]

    # Collect what the patches state of members whose content the key leaves open.
    unknown = set[str]()
    for antecedent in wanted:
        unknown |= {member.id for member in antecedent.members if member.content is None}
    stated: dict[str, set[str]] = {}
    for antecedents in formed:
        for antecedent in antecedents:
            for member in antecedent.members:
                if member.id in unknown and member.content is not None:
                    stated.setdefault(member.id, set()).add(member.content)

    # Decide on one content per member, None where several are possible.
    meant: dict[str, str | None] = {}
    for id, alternatives in stated.items():
        candidates = {content for content in contents(id) if content is not None} or alternatives
        meant[id] = next(iter(candidates)) if len(candidates) == 1 else None
    wanted = [_with_contents(antecedent, meant) for antecedent in wanted]

    matches = []
    for metadata, antecedents in zip(stored, formed, strict=True):
        match = len(antecedents) == len(wanted)
        for index, (own, other) in enumerate(zip(antecedents, wanted, strict=False)):
            undecided = any(meant.get(member.id, "") is None and member.content is not None for member in own.members)
            # The order of the antecedent does not matter to an orbit patch; that of its base's does.
            match = match and not undecided and own.difference(other, metadata.orbit and index == 0) is None
        matches.append(match)
    return matches


def _antecedents(key: PatchKey | PatchMetadata) -> list[Antecedent]:
    """Returns the antecedent, and that of the base if it is conditioned."""
    base = key.base_behind
    return [key.behind] if base is None else [key.behind, base]


def _with_contents(antecedent: Antecedent, contents: dict[str, str | None]) -> Antecedent:
    members = []
    for member in antecedent.members:
        if member.content is None and member.id in contents:
            member = member._replace(content=contents[member.id])
        members.append(member)
    return Antecedent(tuple(members))

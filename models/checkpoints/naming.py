"""Ways in which the tensors of one model are called in files: which one a file has, and the same names for all.

A family's entries use one way. Others are tables of what names begin with, chosen by the names that a file holds; a
file that mixes two is refused.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from kvpatch_jax.errors import WeightsError

from .source import RenamedSource, TensorSource

Known = Callable[[str], bool]
"""Whether a name, as the family's entries use them, is one of the model's tensors."""


@dataclasses.dataclass(frozen=True)
class Naming:
    """One way of naming.

    Attributes:
      who: whose names these are, for messages: "as … calls them".
      prefixes: what a name begins with there, and in the family's entries. The longest that fits counts.
    """

    who: str
    prefixes: tuple[tuple[str, str], ...]

    def translate(self, name: str) -> str | None:
        """Turns a name of this kind into the one of the family's entries; None where no prefix fits."""
        fits = [pair for pair in self.prefixes if name.startswith(pair[0])]
        if not fits:
            return None
        theirs, ours = max(fits, key=lambda pair: len(pair[0]))
        return ours + name.removeprefix(theirs)


def translate(namings: Sequence[Naming], known: Known, name: str) -> str | None:
    """Turns a name of any of these kinds into the one of the family's entries; None where it is of none."""
    for naming in namings:
        ours = naming.translate(name)
        if ours is not None and known(ours):
            return ours
    return None


def choose_naming(origin: str, names: Iterable[str], namings: Sequence[Naming], known: Known) -> Naming:
    """Finds the way of naming that a file has: the first that all names known in any way are known in.

    Args:
      origin: the file, for messages. names: of its tensors.

    Raises:
      WeightsError: names of two kinds (it gives both, with an example each), or none that is known.
    """
    claims: dict[str, list[Naming]] = {}
    for name in names:
        ours = [(naming, naming.translate(name)) for naming in namings]
        found = [naming for naming, translated in ours if translated is not None and known(translated)]
        if found:
            claims[name] = found

    if not claims:
        listed = sorted(names)
        found = f"first of {len(listed)}: {listed[0]!r}" if listed else "it holds none"
        kinds = []
        for naming in namings:
            kinds.append(f"{naming.who}: {', '.join(f'{theirs}*' for theirs, _ in naming.prefixes)}")
        raise WeightsError(f"{origin}: got no known tensor ({found}); expected names {'; '.join(kinds)}")

    for naming in namings:
        if all(naming in found for found in claims.values()):
            return naming

    # Names of two kinds: the one that explains most, and a tensor that only another explains.
    most = max(namings, key=lambda naming: sum(naming in found for found in claims.values()))
    other, others = next((name, found) for name, found in claims.items() if most not in found)
    first = next(name for name, found in claims.items() if most in found and others[0] not in found)
    raise WeightsError(
        f"{origin}: got two kinds of names, tensor {first!r} named {most.who}, {other!r} {others[0].who}; expected one "
        "of them throughout"
    )


def rename(source: TensorSource, namings: Sequence[Naming], known: Known) -> TensorSource:
    """Gives the tensors of a file the names of the family's entries; names that are not known stay.

    Raises:
      WeightsError: as `choose_naming`.
    """
    if len(namings) == 1:
        return source

    naming = choose_naming(source.origin, source.tensors, namings, known)
    if naming == namings[0]:
        return source

    def ours(name: str) -> str:
        translated = naming.translate(name)
        return translated if translated is not None and known(translated) else name

    renamed = RenamedSource(source, ours)
    renamed.origin = f"{source.origin} (named {naming.who}; here {namings[0].who})"
    return renamed


def same(who: str, *prefixes: str) -> Naming:
    """Returns the names of the family's entries themselves, by what they begin with."""
    return Naming(who, tuple((prefix, prefix) for prefix in prefixes))

"""Steps that rebuild a window behind a chunk that returned, came in or was replaced, and the loss if they stop early.

The pieces behind it have not seen it there. A piece whose KV is wrong is corrected by a stored patch, if one was formed
behind exactly the pieces that are there now, or by a forward. Kamera App. E.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from kvpatch_jax.errors import InputError, StalePatchError
from kvpatch_jax.window import Entry, PatchNote, PlacedPiece, Recompute, Window, composing_edits

from .piece_order import Cost, Front
from .window_placement import NOTHING, Price, StoredPatches, contents_differ, flops_of, placing

NODES = 50_000
"""Choices of stored patches that are examined; beyond, the best one so far is used."""
ROUNDING = 1e-12
"""Relative error that sums of losses may have."""
How = Literal["stored", "formed", "run"]


class Dependent(NamedTuple):
    """Piece behind a change, in window order.

    Attributes:
      id: its name.
      loss: of an answer while the piece stays as it is; 0 if its KV is right.
      form: cost of its forward; 0 of a piece whose KV is exact (or a survivor's) already.
      place: cost of placing the stored patch that is valid there; None without one.
      patch: that patch.
    """

    id: str
    loss: Cost
    form: Cost
    place: Cost | None = None
    patch: PatchNote | None = None


class Rebuild(NamedTuple):
    """One step of a cascade.

    Attributes:
      id: the piece. how: its "stored" patch is placed; it runs, so that a patch is "formed" of it; or it was right, but
        served by a patch, and is "run" so that what is formed behind it finds exact KV.
      cost: of the step. left: the loss that is left behind it.
      patch: the stored one.
    """

    id: str
    how: How
    cost: Cost
    left: Cost
    patch: PatchNote | None = None


class Cascade(NamedTuple):
    """Steps of a rebuild, in order.

    Attributes:
      steps: the cheapest ones that bring the loss within the bound, in the order in which stopping early loses least.
      loss: of doing nothing. left_as_they_are: ids of pieces that stay wrong, within the bound.
      minimal: whether nothing cheaper reaches the bound; else it was looked for, not proved.
    """

    steps: tuple[Rebuild, ...]
    loss: Cost
    left_as_they_are: tuple[str, ...]
    minimal: bool

    @property
    def cost(self) -> Cost:
        """Cost of all steps."""
        return sum(step.cost for step in self.steps)

    @property
    def left(self) -> tuple[Cost, ...]:
        """Loss after 0, 1, … steps."""
        return (self.loss, *(step.left for step in self.steps))


def cascade(
    window: Window,
    bound: Cost = 0,
    losses: Mapping[str, Cost] | None = None,
    stored: StoredPatches = NOTHING,
    *,
    price: Price = flops_of,
    front: Front = "exact",
) -> Cascade:
    """Returns what to rebuild in a window, for instance behind a chunk that was recalled or replaced. Kamera App. E.

    Args:
      window: as it stands behind the change.
      bound: the loss that may be left, as a sum over pieces.
      losses: by id, what an answer loses while a piece stays as it is, such as a certificate's bound; a piece that is
        not named loses nothing. None: its share of the window's tokens.
      stored: patches that there are.
      price: of edits; their FLOPs by default.
      front: "exact": what is formed finds exact KV in front of it, so that all in front that is approximate runs too,
        and its patch can be stored. "served": it runs behind whatever serves the others.

    Raises:
      InputError: a bound or a loss that is negative or no number, or a loss of a piece that is not in the window.
    """
    if strangers := sorted(set(losses or ()) - set(window.ids)):
        raise InputError(f"cascade.losses: got {strangers[0]!r:.80}; expected ids of the window")
    return rebuild(dependents(window, losses, stored, price=price), bound, front)


def dependents(
    window: Window,
    losses: Mapping[str, Cost] | None = None,
    stored: StoredPatches = NOTHING,
    *,
    price: Price = flops_of,
) -> list[Dependent]:
    """Returns the pieces whose KV is not exact, in window order. Arguments as `cascade`."""
    found = []
    for index, piece in enumerate(window.pieces):
        id, tokens = piece.entry.id, piece.entry.tokens
        if piece.fidelity != "approximate" and (window.promise == "remember" or piece.fidelity == "exact"):
            continue

        behind = window.behind(id)
        composed = composing_edits(window.costs, id, index)
        form = price((*composed, Recompute(id, 0, behind, **window.costs.prefill(tokens, behind))))
        if _fits(window, piece, stored):
            found.append(Dependent(id, 0, form))
            continue

        loss = tokens / window.tokens if losses is None else losses.get(id, 0)
        # Of the stored patches that are valid there, the cheapest to place; the first of equal ones.
        cheapest: tuple[Cost, PatchNote] | None = None
        for note in stored.of_chunk.get(id, ()):
            if _serves(window, note, piece.entry):
                cost = price(placing(window.costs, piece.entry, note))
                cheapest = (cost, note) if cheapest is None or cost < cheapest[0] else cheapest
        found.append(Dependent(id, loss, form, *(cheapest or (None, None))))

    return found


def _fits(window: Window, piece: PlacedPiece, stored: StoredPatches) -> bool:
    """Returns whether a piece is served by the patch of the pieces in front of it."""
    if piece.state.kind != "patched" or piece.state.base != "canonical":
        return False
    for note in stored.of_chunk.get(piece.entry.id, ()):
        if note.digest == piece.state.patch:
            return _serves(window, note, piece.entry)
    return piece.state.behind == piece.target


def _serves(window: Window, note: PatchNote, entry: Entry) -> bool:
    """Returns whether a patch is valid for a piece where it stands."""
    same = not contents_differ(note.content, entry.content)
    return same and note.antecedent.difference(window.target(entry.id), note.orbit) is None


def rebuild(pieces: Sequence[Dependent], bound: Cost = 0, front: Front = "exact") -> Cascade:
    """Returns the cheapest steps that leave at most a loss, and their order. Arguments as `cascade`.

    The last piece that is formed decides how far the front must be exact: all in front of it runs. So every last piece
    is tried, and behind it the stored patches that reach the bound at the least cost.

    Raises:
      InputError: a bound, a loss or a cost that is negative or no number.
    """
    numbers = [bound]
    for piece in pieces:
        numbers += [piece.loss, piece.form, piece.place or 0]
    for number in numbers:
        if not isinstance(number, int | float) or isinstance(number, bool) or not number >= 0:
            raise InputError(f"cascade: got {number!r:.80}; expected bound, losses and costs >= 0")

    best: tuple[tuple[Cost, int], list[RebuildChoice]] | None = None
    minimal, loss = True, sum(piece.loss for piece in pieces)
    slack = ROUNDING * loss
    for last in range(-1, len(pieces)) if front == "exact" else [-1]:
        if last >= 0 and not pieces[last].loss:
            continue

        run = []
        for piece in pieces[: last + 1]:
            if piece.form:
                run.append(RebuildChoice(piece, "formed" if piece.loss else "run", piece.form))

        # Behind the last one, what each piece takes by itself; what nothing brings right keeps its loss.
        choices, room = list[RebuildChoice](), bound
        for piece in pieces[last + 1 :]:
            if piece.place is not None and (front == "exact" or piece.place <= piece.form) and piece.loss:
                choices.append(RebuildChoice(piece, "stored", piece.place))
            elif front == "served" and piece.loss:
                choices.append(RebuildChoice(piece, "formed", piece.form))
            else:
                room -= piece.loss

        chosen, proved = _cover(choices, room, slack)
        minimal = minimal and proved
        if chosen is not None:
            steps = [*run, *chosen]
            value = sum(step.cost for step in run) + sum(step.cost for step in chosen), len(steps)
            if best is None or value < best[0]:
                best = value, steps

    assert best is not None  # running everything leaves nothing
    rebuilt = {step.piece.id for step in best[1]}
    left = tuple(piece.id for piece in pieces if piece.loss and piece.id not in rebuilt)
    place = {piece.id: at for at, piece in enumerate(pieces)}
    in_place = sorted(best[1], key=lambda step: place[step.piece.id])
    return Cascade(_in_turn(in_place, loss), loss, left, minimal)


class RebuildChoice(NamedTuple):
    """One piece that is rebuilt, before steps have an order."""

    piece: Dependent
    how: How
    cost: Cost


def _cover(choices: Sequence[RebuildChoice], room: Cost, slack: Cost) -> tuple[list[RebuildChoice] | None, bool]:
    """Returns the cheapest steps without which at most `room` of loss is left, fewest first; None if none reach it.

    Branch and bound: by loss for cost, with the fraction of the first that is not taken whole as its bound.
    """
    if room < -slack:
        return None, True

    ordered = sorted(choices, key=lambda step: -step.piece.loss / step.cost if step.cost else -math.inf)
    need = sum(step.piece.loss for step in ordered) - room
    best: tuple[tuple[Cost, int], list[RebuildChoice]] = (math.inf, 0), []
    nodes = 0

    def least(at: int, missing: Cost) -> Cost:
        cost: Cost = 0
        for step in ordered[at:]:
            if missing <= 0:
                break
            cost += step.cost * min(1, missing / step.piece.loss)
            missing -= step.piece.loss
        return cost if missing <= slack else math.inf

    def grow(at: int, taken: list[RebuildChoice], cost: Cost, missing: Cost) -> None:
        nonlocal nodes, best
        nodes += 1
        if missing <= slack:
            best = min(best, ((cost, len(taken)), taken), key=lambda found: found[0])
        elif at < len(ordered) and nodes <= NODES and cost + least(at, missing) <= best[0][0]:
            step = ordered[at]
            grow(at + 1, [*taken, step], cost + step.cost, missing - step.piece.loss)
            grow(at + 1, taken, cost, missing)

    grow(0, [], 0, need)
    return (None if best[0][0] == math.inf else best[1]), nodes <= NODES


def _in_turn(steps: Sequence[RebuildChoice], loss: Cost) -> tuple[Rebuild, ...]:
    """Orders steps so that stopping early loses least: those that remove most loss per cost first.

    Forwards, and the patches that they read, have to be done from the front: of these, the prefix that removes most.
    """

    def gain(steps: Sequence[RebuildChoice]) -> float:
        cost = sum(step.cost for step in steps)
        return sum(step.piece.loss for step in steps) / cost if cost else math.inf

    last = max((at for at, step in enumerate(steps) if step.how != "stored"), default=-1)
    chain, single = list(steps[: last + 1]), sorted(steps[last + 1 :], key=lambda step: -gain([step]))
    turn: list[RebuildChoice] = []
    while chain or single:
        beginnings = [chain[: length + 1] for length in range(len(chain))]
        first = max(beginnings, key=gain, default=[])
        if single and (not first or gain(single[:1]) >= gain(first)):
            turn.append(single.pop(0))
        else:
            turn += first
            chain = chain[len(first) :]

    # Losses are summed from the end, so that what is left of all steps together is exact.
    found, unchanged = [], loss - sum(step.piece.loss for step in turn)
    for at, (piece, how, cost) in enumerate(turn):
        left = sum(step.piece.loss for step in turn[at + 1 :]) + unchanged
        found.append(Rebuild(piece.id, how, cost, left, piece.patch if how == "stored" else None))
    return tuple(found)


def carried_out(window: Window, cascade: Cascade, steps: int | None = None) -> tuple[Window, tuple]:
    """Returns the window after the first steps of a cascade, and the edits that lead there.

    Args:
      steps: how many; None for all.

    Raises:
      StalePatchError: a stored patch that does not fit, of a cascade of another window.
    """
    edits: list = []
    for step in cascade.steps[:steps]:
        if step.how == "stored":
            if step.patch is None:
                raise StalePatchError(f"cascade: got no patch of {step.id!r:.80}; expected the one found stored")
            window, more = window.condition(step.id, step.patch)
        else:
            window, more = window.recompute(step.id)
        edits += more

    return window, tuple(edits)

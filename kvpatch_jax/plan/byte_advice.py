"""What to keep of a chunk: which encoding and rank costs the fewest bytes at a quality, by measured curves.

`byte_curves.json` holds points that `python -m evals.run --suite=bytes` measured on real weights: a method of keeping a
chunk, and the share of blind reuse's KL that it removes (eta) with its interval. A point of a patch has the average
rank over layers and channels. Bytes follow from the shape of the caller's model; the rank is taken over as it is, since
what a chunk absorbs was found to have a rank that hardly grows with the width (docs/guides/what-to-keep.md).
"""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from importlib import resources
from typing import Any, Literal

import jax.numpy as jnp

from ..backbone import Backbone
from ..core import KVEncoding, KVLayout, packed_bytes
from ..core.ops import factor_bits
from ..errors import InputError
from ..utils.kinds import expect_kind, is_whole
from ..utils.sizes import Size, size_of

QUALITY = 0.93
"""Share of blind reuse's KL that is to be removed, where the caller names neither quality nor budget."""
Kept = Literal["conditioned", "patched"]


@dataclasses.dataclass(frozen=True)
class KeptForm:
    """One form in which a chunk can be kept, as it was measured.

    Attributes:
      kept: "conditioned", the chunk's KV behind each antecedent; or "patched", one base and a patch for each.
      encoding: word of the encoding of that KV or base; None for 16 bits.
      base: what a patch is added to: "alone", "lead", "mean" or "first"; None of conditioned KV.
      factors: dtype of a patch's factors; None of conditioned KV.
      rank: of the patch, the mean over layers and channels; 0 of conditioned KV.
      weights: by which directions were chosen: "fisher" (`calibrate_sensitivity`), "reading" (`calibrate_weights`), or
        None.
      antecedents: how many there were in the measurement, where that changes the base; None: any number.
      eta, low, high: share of blind reuse's KL that is removed, and its 95 % interval.
    """

    kept: Kept
    encoding: str | None
    base: str | None
    factors: str | None
    rank: float | int
    weights: str | None
    antecedents: int | None
    eta: float
    low: float
    high: float

    def bytes_once(self, layout: KVLayout, tokens: int) -> int:
        """Counts the bytes that are kept once for all antecedents: those of the base."""
        return _kv_bytes(layout, tokens, self.encoding) if self.kept == "patched" else 0

    def bytes_each(self, layout: KVLayout, tokens: int) -> int:
        """Counts the bytes that are kept for each antecedent, scales included."""
        if self.kept == "conditioned":
            return _kv_bytes(layout, tokens, self.encoding)
        total, few = 0.0, factor_bits(self.factors)
        for channel in layout.channels:
            rows = channel.rows_for(tokens)
            rank = min(self.rank, rows, channel.features)
            for length in (rows, channel.features):
                # int8 has one float32 scale per direction.
                size = length + 4 if few is None else packed_bytes(1, length, *few, -1, symmetric=True)
                total += rank * size * layout.depth(channel.name)
        return round(total)

    def __str__(self) -> str:
        bits = "16 bits" if self.encoding is None else self.encoding
        if self.kept == "conditioned":
            return f"KV behind each antecedent in {bits}"
        chosen = "" if self.weights is None else f", directions by {self.weights} weights"
        patch = f"a patch of rank {self.rank:g} in {self.factors}{chosen}"
        return f"base ({self.base}) in {bits}, and for each antecedent {patch}"


@dataclasses.dataclass(frozen=True)
class ByteAdvice:
    """The form that `advise` chose, and its bytes.

    Attributes:
      form: what to keep.
      nbytes: per antecedent, an N-th of what is kept once included.
      share: the same over the chunk's KV in 16 bits.
      rival: the best form of the other kind that reaches the same quality, or None; rival_nbytes: its bytes.
      break_even: number of antecedents from which a base with patches takes fewer bytes than conditioned KV, at the
        quality of the advice; None: never.
      patch_nbytes: of one patch, for `ByteBudget`; None where conditioned KV is kept.
    """

    form: KeptForm
    nbytes: int
    share: float
    rival: KeptForm | None
    rival_nbytes: int | None
    break_even: int | None
    patch_nbytes: int | None

    def __str__(self) -> str:
        lines = [f"{self.form}: {self.share:.1%} of the KV in 16 bits per antecedent, eta {self.form.eta:.3f}"]
        if self.rival is not None and self.rival_nbytes is not None:
            lines.append(f"the other way takes {self.rival_nbytes / self.nbytes:.2f} times as many bytes: {self.rival}")
        when = "never" if self.break_even is None else f"from {self.break_even} antecedents on"
        return "\n".join([*lines, f"a base with patches takes fewer bytes {when}"])


def advise(
    model: Backbone | KVLayout,
    tokens: int,
    antecedents: int = 1,
    *,
    quality: float | int | None = None,
    budget: Size | None = None,
    forms: Sequence[KeptForm] | None = None,
) -> ByteAdvice:
    """Advises what to keep of a chunk that is met behind some antecedents, from measured curves.

    Args:
      model: a backbone, or the layout of its KV.
      tokens: of the chunk.
      antecedents: N, how many different ones it is met behind (nearest antecedents: what stands further in front
        hardly matters).
      quality: the share of blind reuse's KL to be removed at least, 0 to 1; .93 where no budget is given.
      budget: bytes per antecedent at most, all that is kept once shared by N. The best quality within it is chosen.
      forms: measured ones to choose among, such as of the caller's own model; None: `measured_forms`.

    Raises:
      InputError: tokens or antecedents below 1, a quality that no measured form reaches, a budget that none fits, both
        a quality and a budget, or no form that was measured for so many antecedents.
    """
    layout: Any = model if isinstance(model, KVLayout) else getattr(model, "layout", None)
    expect_kind(layout, KVLayout, "advise: model", "a backbone or a KVLayout")
    for word, count in (("tokens", tokens), ("antecedents", antecedents)):
        if not is_whole(count, 1):
            raise InputError(f"advise: got {word} {count!r:.80}; expected a whole number from 1")
    if quality is not None and budget is not None:
        raise InputError(f"advise: got quality {quality} and budget {budget!r}; expected one of them")
    wanted = QUALITY if quality is None else quality
    if isinstance(wanted, bool) or not isinstance(wanted, int | float) or not 0 <= wanted <= 1:
        raise InputError(f"advise: got quality {quality!r:.80}; expected 0 to 1")

    known = measured_forms() if forms is None else tuple(forms)
    forms = _forms_at(antecedents, known)
    if not forms:
        raise InputError(
            f"advise: got {len(known)} forms, none of them for {antecedents} antecedents; expected at least one"
        )
    costs = {form: _bytes_of(form, layout, tokens, antecedents) for form in forms}
    if budget is not None:
        allowed = size_of(budget, "advise: budget")
        fitting = [form for form in forms if costs[form] <= allowed]
        if not fitting:
            raise InputError(f"advise: got a budget of {allowed} bytes; expected at least {min(costs.values())}")
        chosen = max(fitting, key=lambda form: (form.eta, -costs[form]))
        # Others are compared at the quality that the chosen form is known to reach.
        wanted = chosen.eta
    else:
        fitting = [form for form in forms if form.eta >= wanted]
        if not fitting:
            best = max(form.eta for form in forms)
            raise InputError(f"advise: got quality {wanted}; expected at most {best:.3f}, the highest measured")
        chosen = min(fitting, key=lambda form: (costs[form], -form.eta))

    alike = [form for form in forms if form.eta >= wanted]
    rival = min((form for form in alike if form.kept != chosen.kept), key=lambda form: costs[form], default=None)
    return ByteAdvice(
        form=chosen,
        nbytes=costs[chosen],
        share=costs[chosen] / _kv_bytes(layout, tokens, None),
        rival=rival,
        rival_nbytes=None if rival is None else costs[rival],
        break_even=_break_even(wanted, layout, tokens, known),
        patch_nbytes=chosen.bytes_each(layout, tokens) if chosen.kept == "patched" else None,
    )


@functools.cache
def measured_forms() -> tuple[KeptForm, ...]:
    """Returns the measured forms, as `byte_curves.json` has them."""
    text = resources.files(__package__).joinpath("byte_curves.json").read_text(encoding="utf-8")
    fields = [field.name for field in dataclasses.fields(KeptForm)]
    points: list[dict[str, Any]] = json.loads(text)["points"]
    return tuple(KeptForm(**{name: point[name] for name in fields}) for point in points)


def _bytes_of(form: KeptForm, layout: KVLayout, tokens: int, antecedents: int) -> int:
    return form.bytes_each(layout, tokens) + math.ceil(form.bytes_once(layout, tokens) / antecedents)


def _kv_bytes(layout: KVLayout, tokens: int, encoding: str | None) -> int:
    if encoding is not None:
        return KVEncoding.of(encoding).nbytes(layout, tokens)
    return layout.bytes_per_token() * tokens + layout.transition_bytes(jnp.bfloat16)


def _forms_at(antecedents: int, known: Sequence[KeptForm]) -> list[KeptForm]:
    """Lists the forms that were measured with so many antecedents, or with the next larger number that was tried.

    A base that depends on their number lies the further from each the more there are; of one antecedent it would be
    the conditioned KV itself.
    """
    tried = sorted({form.antecedents for form in known if form.antecedents is not None})
    nearest = next((count for count in tried if count >= antecedents), tried[-1] if tried else None)
    nearest = None if antecedents == 1 else nearest
    return [form for form in known if form.antecedents in (None, nearest)]


def _break_even(quality: float | int, layout: KVLayout, tokens: int, known: Sequence[KeptForm]) -> int | None:
    """Returns the least N at which some base with patches takes fewer bytes than every conditioned form; to 64."""
    for count in range(1, 65):
        best = {"conditioned": math.inf, "patched": math.inf}
        for form in _forms_at(count, known):
            if form.eta >= quality:
                best[form.kept] = min(best[form.kept], _bytes_of(form, layout, tokens, count))
        if best["patched"] < best["conditioned"]:
            return count
    return None

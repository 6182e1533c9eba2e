"""The arms of the suite: what may be kept of a chunk and its versions, by name and family."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kvpatch_jax.repair import REPAIRS, RepairBudget, Repaired
from kvpatch_jax.repair.stored_kv import KVPrecision

from .forms import FormFactory, StoredForm

SIMPLE, OURS, RIVALS, BASES_ALONE, KEYS = "kv", "patch", "rival", "base", "keys"
"""Families: KV(B|A) in few bits; a base and a patch; published rivals; a base alone; keys rounded, values whole."""
FISHER = "fisher"
"""Weights of features, by the gradient of what follows."""
ANY_BYTES = RepairBudget(kv_bytes=1 << 40)
"""Of rivals whose setting is given."""
BASE_LABELS = {
    "canonical": "the canonical",
    "others": "the mean of the others",
    "mean": "the mean of all",
}
RIVAL_LABELS = {
    "polykv": "PolyKV: K 8, V 3",
    "kv_adaquant": "KV-AdaQuant: K 4, V 2",
    "gear": "GEAR",
    "cachegen": "CacheGen",
    "block_differences": "TokenDance: sparse blocks",
    "anchored": "KVCOMM: anchors",
    "joint_pair": "[A B] as one chunk",
    "averaged": "averaged KV",
    "encoded_deficit": "Δ in few bits",
}
KEY_PLACES = {"before": "by feature, before rotation", "after": "by feature, after", "token": "by token, after"}
TEXT_KV = ("k6v6gall", "k5v5gall", "k5v4gall", "k4v4gall", "k4v4g64", "k4v4g32")
WIDE_KV = ("16", "k8v8gall", "k6v5gall", "k4v5gall", "k5v3gall", "k3v3g32", "k2v2g32")
TASK_KV = ("16", "k4v4gall", "k3v3gall", "k3v3g32", "k3v2gall", "k2v2gall", "k2v2g32", "k2v1gall", "k1v1g32")
"""Encodings of KV(B|A): on text, on a part of the text, and on small tasks."""
Make = Callable[[FormFactory, int, int], StoredForm]


@dataclasses.dataclass(frozen=True)
class BytesArm:
    """One thing to keep.

    Attributes:
      name: as rows have it; where it depends on the number of antecedents, rows have "@N" behind it.
      family: what it is. label: in figures and tables.
      make: makes it of a version, as one of so many antecedents.
      by_count: whether it depends on how many antecedents there are.
      settings: of keys in few bits: how many, and the group.
    """

    name: str
    family: str
    label: str
    make: Make
    by_count: bool = False
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def row_name(self, antecedents: int) -> str:
        """Returns the name of its rows for a number of antecedents."""
        return f"{self.name}@{antecedents}" if self.by_count else self.name


def precision_of(word: str) -> KVPrecision:
    """Returns the precision of an encoding's word, or of "16"."""
    return KVPrecision.of(16 if word == "16" else word)


def kv_arm(word: str) -> BytesArm:
    """Makes the arm of KV(B|A) in an encoding, or in 16 bits ("16")."""
    precision = precision_of(word)

    def make(factory: FormFactory, version: int, antecedents: int) -> StoredForm:
        return factory.few_bits(precision, version)

    return BytesArm(f"kv.{word}", SIMPLE, "KV(B|A) in few bits", make)


def patch_arm(
    base: str,
    word: str,
    factors: str,
    *,
    share: float | None = None,
    rank: int | None = None,
    weights: str | None = None,
    relative: float | None = None,
) -> BytesArm:
    """Makes the arm of a patch on a base: ranks by layer and channel within a share of the KV's bytes, or one rank.

    Fisher weights compare layers themselves, so with them energies are compared as they are.
    """
    precision, fisher = precision_of(word), weights == FISHER
    name = f"patch.{base}.{word}.{factors}." + (f"share={share:g}" if rank is None else f"rank={rank}")
    name += ("" if weights is None else f".{weights}") + ("" if relative is None else f".relative={relative:g}")
    own = {"share": share, "rank": rank, "weights": weights}
    own["relative"] = 0.0 if fisher and relative is None else relative

    def make(factory: FormFactory, version: int, antecedents: int) -> StoredForm:
        return factory.patched(base, precision, version, antecedents, factors=factors, **own)

    return BytesArm(name, OURS, f"patch on {BASE_LABELS[base]}", make, depends_on_count(base))


def base_arm(base: str, word: str = "16") -> BytesArm:
    """Makes the arm of a base without a patch."""
    precision = precision_of(word)

    def make(factory: FormFactory, version: int, antecedents: int) -> StoredForm:
        return factory.base_alone(base, precision, version, antecedents)

    return BytesArm(f"base.{base}.{word}", BASES_ALONE, BASE_LABELS[base], make, depends_on_count(base))


def depends_on_count(base: str) -> bool:
    """Returns whether a base is another one for another number of antecedents."""
    return base in ("others", "mean")


def rival_arm(
    method: str, setting: str, *, by_count: bool = False, budget: float | None = None, **options: Any
) -> BytesArm:
    """Makes the arm of a repair of the library that stores a form of KV.

    Args:
      setting: in the name.
      budget: bytes as a share of the KV's; None: as many as its settings take.
      options: settings of the method.
    """

    def make(factory: FormFactory, version: int, antecedents: int) -> StoredForm:
        splice = factory.chunks.splice(version)
        members = set(factory.members("others", version, antecedents))
        numbers = [number for number in range(len(factory.chunks)) if number != version]
        others = tuple(other for number, other in zip(numbers, splice.others, strict=True) if number in members)
        allowed = ANY_BYTES if budget is None else RepairBudget(kv_bytes=int(budget * factory.kv_bytes))
        own = {"embedding": factory.chunks.embeddings[version]} if method == "anchored" else {}
        splice = splice.replace(others=others)
        repaired: Repaired = REPAIRS[method](factory.chunks.backbone, splice, allowed, **own, **options)
        forming = float(factory.costs.prefill)
        return StoredForm(None, repaired.bytes, repaired.flops, forming, dict(repaired.cache))

    return BytesArm(f"{method}.{setting}", RIVALS, RIVAL_LABELS[method], make, by_count)


def key_arm(bits: int, where: str, group: int | None) -> BytesArm:
    """Makes the arm that rounds keys alone, by feature before or after the rotation, or by token."""

    def make(factory: FormFactory, version: int, antecedents: int) -> StoredForm:
        return factory.keys_rounded(version, bits, where, group)

    settings = {"keys": bits, "group": "all" if group is None else group}
    width = "gall" if group is None else f"g{group}"
    return BytesArm(f"keys.{where}.{bits}{width}", KEYS, KEY_PLACES[where], make, settings=settings)


TEXT_GRID = (("mean", "k5v5gall", (0.03, 0.05, 0.10)),)
TEXT_MORE = (
    ("mean", "k6v6gall", "int4", (0.05, 0.10)),
    ("mean", "k5v4gall", "int4", (0.05, 0.07)),
    ("mean", "k4v4gall", "int4", (0.07, 0.10)),
    ("mean", "k5v5gall", "int3", (0.05,)),
    ("mean", "k5v5gall", "int4gall", (0.05,)),
    ("mean", "k5v5gall", "int5", (0.05,)),
    ("mean", "k5v5gall", "int8", (0.05, 0.10)),
    ("others", "k5v5gall", "int4", (0.05, 0.07, 0.10)),
    ("canonical", "k5v5gall", "int4", (0.05, 0.10)),
    ("canonical", "k4v4gall", "int4", (0.10,)),
)
"""Of text, all batches and a part of them: bases, their encodings, factors, and patches' shares of the KV's bytes."""
TASK_GRID = (
    ("mean", "k4v4gall", (0.02, 0.04, 0.07)),
    ("mean", "k3v3gall", (0.02, 0.04, 0.07)),
    ("mean", "k2v2g32", (0.02, 0.04, 0.07)),
    ("mean", "k2v2gall", (0.01, 0.02, 0.04)),
    ("mean", "k2v1gall", (0.01, 0.02, 0.04)),
    ("others", "k3v3gall", (0.04, 0.07)),
    ("canonical", "k4v4gall", (0.04, 0.07)),
    ("canonical", "k3v3gall", (0.07,)),
)
"""Of small tasks, whose models need fewer bits."""
WEIGHED = (("k5v5gall", (0.03, 0.05, 0.07)), ("k5v4gall", (0.05, 0.07)))
"""Encodings of the mean, and shares, at which directions are also chosen by weights."""


def core_arms(weights: Sequence[str] = ()) -> list[BytesArm]:
    """Lists the arms that every batch of text has, those of one base together: a deficit is decomposed once.

    Args:
      weights: names of the weights by which directions are also chosen.
    """
    arms = [base_arm("canonical"), *map(kv_arm, TEXT_KV)]
    for base, word, shares in TEXT_GRID:
        arms += [patch_arm(base, word, "int4", share=share) for share in shares]
    for name in weights:
        for word, shares in WEIGHED:
            arms += [patch_arm("mean", word, "int4", share=share, weights=name) for share in shares]
    arms.append(patch_arm("canonical", "16", "int8", rank=16))
    return arms


def task_arms() -> list[BytesArm]:
    """Lists the arms of small tasks: as those of text, in fewer bits."""
    arms = [base_arm("canonical"), *map(kv_arm, TASK_KV)]
    arms += [base_arm(base) for base in BASE_LABELS if base != "canonical"]
    for base, word, shares in TASK_GRID:
        arms += [patch_arm(base, word, "int4", share=share) for share in shares]
    arms.append(patch_arm("canonical", "16", "int8", rank=8))
    return arms


def task_wide_arms() -> list[BytesArm]:
    """Lists the arms of a part of the small tasks' batches: published rivals, factors, and keys alone."""
    arms = [patch_arm("mean", "k3v3gall", dtype, share=0.04) for dtype in ("int3", "int8")]
    arms += [patch_arm("mean", "k3v3gall", "int4", rank=rank) for rank in (4, 8)]
    return [*arms, *rival_arms("k3v3gall", (0.1, 0.15, 0.2), (2, 3)), *key_arms((2, 3))]


def wide_arms(weights: Sequence[str] = ()) -> list[BytesArm]:
    """Lists the arms that a part of the batches has: other encodings, bases, factors, published rivals, keys alone.

    Args:
      weights: names of the weights by which directions are also chosen.
    """
    arms = list(map(kv_arm, WIDE_KV))
    arms += [base_arm(base) for base in BASE_LABELS if base != "canonical"]
    for base, word, factors, shares in TEXT_MORE:
        arms += [patch_arm(base, word, factors, share=share) for share in shares]
    arms += [patch_arm("mean", "k5v5gall", "int4", rank=rank) for rank in (16, 32)]
    arms += [patch_arm("mean", "k5v5gall", "int4", share=0.05, relative=relative) for relative in (0.0, 1.0)]
    for name in weights:
        arms += [patch_arm("others", "k5v5gall", "int4", share=share, weights=name) for share in (0.05, 0.07, 0.10)]
    return [*arms, *rival_arms(), *key_arms()]


def key_arms(bits: Sequence[int] = (3, 4)) -> list[BytesArm]:
    """Lists the arms that round keys alone."""
    return [key_arm(count, where, group) for count in bits for where in KEY_PLACES for group in (32, None)]


def rival_arms(
    word: str = "k5v5gall", shares: Sequence[float] = (0.2, 0.25, 0.3), bits: Sequence[int] = (3, 4)
) -> list[BytesArm]:
    """Lists the published rivals.

    Args:
      word: encoding of bases and of KV that is averaged, paired, or interpolated.
      shares: of the KV's bytes, for CacheGen. bits: of a number, for GEAR and for a deficit without low rank.
    """
    blocks = {"base": "mean", "encoding": word, "bits": 4, "budget": 0.1}
    delta = {"group": None, "encoding": word}
    arms = [rival_arm("polykv", "k8v3"), rival_arm("kv_adaquant", "k4v2")]
    arms += [rival_arm("gear", f"bits={count}", bits=count) for count in bits]
    arms += [rival_arm("cachegen", f"share={share:g}", budget=share) for share in shares]
    arms.append(rival_arm("block_differences", "first.16.share=0.3", by_count=True, budget=0.3, base="first"))
    arms.append(rival_arm("block_differences", f"others.{word}.int4.share=0.1", by_count=True, **blocks))
    arms.append(rival_arm("anchored", word, by_count=True, precision=word, encoding=word))
    arms.append(rival_arm("joint_pair", word, precision=word))
    arms.append(rival_arm("averaged", word, by_count=True, precision=word))
    arms += [rival_arm("encoded_deficit", f"{word}.bits={count}", bits=count, **delta) for count in bits]
    others = {"base": "mean", "bits": bits[0], **delta}
    arms.append(rival_arm("encoded_deficit", f"others.{word}.bits={bits[0]}", by_count=True, **others))
    return arms


def sixteen_arms(weights: Sequence[str] = ()) -> list[BytesArm]:
    """Lists the arms that are measured with sixteen antecedents: the best simple rivals, and patches on few bases."""
    arms = [base_arm("canonical"), *map(kv_arm, ("k5v5gall", "k5v4gall", "k4v4gall")), base_arm("mean")]
    arms += [patch_arm("mean", "k5v5gall", "int4", share=share) for share in (0.05, 0.10)]
    for name in weights:
        for word, shares in (("k5v5gall", (0.05, 0.06, 0.065)), ("k6v6gall", (0.05, 0.06, 0.07))):
            arms += [patch_arm("mean", word, "int4", share=share, weights=name) for share in shares]
    return arms


def task_sixteen_arms() -> list[BytesArm]:
    """Lists the arms of a small task's pages with sixteen antecedents."""
    arms = [base_arm("canonical"), *map(kv_arm, TASK_KV), base_arm("mean")]
    for base, word, shares in TASK_GRID:
        arms += [patch_arm(base, word, "int4", share=share) for share in shares if base == "mean"]
    return arms


def all_arms(weights: Sequence[str] = (FISHER,)) -> dict[str, BytesArm]:
    """Returns every arm by name."""
    arms = [*core_arms(weights), *wide_arms(weights), *sixteen_arms(weights)]
    arms += [*task_arms(), *task_wide_arms(), *task_sixteen_arms()]
    return {arm.name: arm for arm in arms}

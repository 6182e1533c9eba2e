"""Damage to every kind of file of a root and of its snapshots: found, or without any effect, and never silent."""

import collections
import dataclasses
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from store_cases import BACKBONE, chunk_of, patch_of
from test_damage import damaged

from kvpatch_jax.errors import StoreError
from kvpatch_jax.store import Budget, ChunkStore, DynamicLibrary, StaticLibrary, load_snapshot, save_snapshot
from kvpatch_jax.store.format.codec import chunk_blob
from kvpatch_jax.store.format.objects import Blob

KEYS = {"plain": None, "sealed": b"k" * 32}
CHUNK = chunk_of(tokens=5, encoder=np.ones((3, 7), np.float32))
PATCH = patch_of(CHUNK)

Seen = dict[str, bytes | None]
"""What a tenant is shown, by what was asked for; None: a miss."""


@dataclasses.dataclass(frozen=True)
class RootAnswers:
    """What a root shows, and whether it says that something is wrong."""

    seen: Seen
    loud: bool


def fill(root: Path) -> None:
    for tenant, key in KEYS.items():
        with ChunkStore(root, tenant=tenant, key=key) as store:
            store.put(CHUNK)
            store.put(CHUNK, encoding="int8")
            store.put_patches([PATCH])
            StaticLibrary(store, quota=1 << 20).put("A", f"text of {tenant}")
            DynamicLibrary(store).publish("R", np.ones((4, 4, 3), np.uint8))


def flat(kv) -> bytes:
    return b"".join(np.asarray(kv[name]).tobytes() for name in sorted(kv))


def shown(store: ChunkStore) -> Seen:
    chunk, reduced = store.get("B", BACKBONE), store.get("B", BACKBONE, encoding="int8")
    encoder, patches = store.get_encoder("B", BACKBONE), store.get_patches(PATCH.metadata)
    entry = StaticLibrary(store, quota=1 << 20).get("TEXT", "A")
    held = DynamicLibrary(store).open("IMAGE", "R")
    seen: Seen = {
        "chunk": None if chunk is None else flat(chunk.kv) + np.asarray(chunk.local).tobytes(),
        "reduced": None if reduced is None else flat(reduced.kv),
        "encoder": None if encoder is None else encoder.tobytes(),
        "patch": b"".join(np.asarray(f).tobytes() for f in patches[0].factors["k"]) if patches else None,  # pyright: ignore
        "entry": None if entry is None else str(entry.content).encode(),
        "reference": None if held is None else np.asarray(held.resource.content).tobytes(),
    }
    if held is not None:
        held.close()
    return seen


def answers(root: Path) -> RootAnswers:
    """Everything that both tenants are shown by a root, newly opened."""
    seen: Seen = {}
    loud = False
    for tenant, key in KEYS.items():
        try:
            with ChunkStore(root, tenant=tenant, key=key, budget=Budget(host=0)) as store:
                seen |= {f"{tenant} {what}": value for what, value in shown(store).items()}
                loud = loud or any(store.counters[word] for word in ("quarantined", "read_errors", "unsealed"))
        except StoreError:
            loud = True
    return RootAnswers(seen, loud)


def restored(snapshot: Path, root: Path, tenant: str | None = None) -> RootAnswers:
    """What a snapshot brings into a new root."""
    try:
        load_snapshot(snapshot, root, tenant=tenant, key=KEYS[tenant] if tenant else None, copy=True)
        found = answers(root)
    except StoreError:
        return RootAnswers({}, True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return (
        found
        if tenant is None
        else RootAnswers({w: v for w, v in found.seen.items() if w.startswith(tenant)}, found.loud)
    )


def kind_of(path: Path) -> str:
    """Files that are alike; a name that nobody thought of is a kind of its own."""
    name = re.sub(r"[0-9a-f]{64}\.", "", path.name)
    name = re.sub(r"^p\..*", "patch", name)
    return f"{path.parts[0]} {name}" if path.parts[0] in ("whole", "one") else name


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.name.endswith("lock")}


def damage_all(tmp_path: Path, trials: int) -> collections.Counter[str]:
    """Damages files so often, each kind as often as another. How often which kind was damaged."""
    root = tmp_path / "root"
    fill(root)
    save_snapshot(root, tmp_path / "whole", copy=True)
    save_snapshot(root, tmp_path / "one", tenant="sealed", copy=True)
    good = answers(root)
    assert not good.loud
    assert all(value is not None for value in good.seen.values())
    reads: dict[str, Callable[[], RootAnswers]] = {
        "root": lambda: answers(root),
        "whole": lambda: restored(tmp_path / "whole", tmp_path / "new"),
        "one": lambda: restored(tmp_path / "one", tmp_path / "new", "sealed"),
    }
    kinds: dict[str, list[tuple[str, Path, bytes]]] = collections.defaultdict(list)
    for where in reads:
        for path, raw in files_of(tmp_path / where).items():
            relative = path.relative_to(tmp_path / where) if where == "root" else path.relative_to(tmp_path)
            kinds[kind_of(relative)].append((where, path, raw))
    rng, done = random.Random(5), collections.Counter[str]()
    while done.total() < trials:
        kind = min(kinds, key=lambda kind: (done[kind], kind))
        where, path, raw = rng.choice(kinds[kind])
        what, changed = damaged(raw, rng.randrange(len(raw)), rng)
        if changed == raw:
            continue
        path.write_bytes(changed)
        check(reads[where](), good, f"{what} of {kind}, {path.name}")
        mend(root, path, raw)
        done[kind] += 1
    assert answers(root) == good
    return done


def check(found: RootAnswers, good: RootAnswers, context: str) -> None:
    """Right, or loud; never wrong."""
    for what, value in found.seen.items():
        assert value is None or value == good.seen[what], f"{context}: {what} is wrong"
        assert value is not None or found.loud, f"{context}: {what} is a silent miss"


def mend(root: Path, path: Path, raw: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    for moved in (root / "quarantine").iterdir():
        moved.unlink()


def test_no_damage_is_silent(tmp_path: Path):
    done = damage_all(tmp_path, 60)
    for kind in ("STORE.json", "KEY", "entry.safetensors", "v000000001.safetensors", "patch", "kv.safetensors",
                 "kv.int8.safetensors", "enc.safetensors", "whole MANIFEST", "whole STORE.json", "one MANIFEST",
                 "one kv.safetensors", "one entry.safetensors"):  # fmt: skip
        assert done[kind] > 1, kind


def test_an_object_with_another_content_under_a_name_is_detected(tmp_path: Path):
    """So the test above would tell: bytes that are whole and wrong."""
    fill(tmp_path / "root")
    good = answers(tmp_path / "root")
    with ChunkStore(tmp_path / "root", tenant="plain") as store:
        other = chunk_blob(chunk_of(seed=1, tokens=5))
        store.disk.put(store.names.canonical(BACKBONE, "B"), Blob("kv", other.body, other.arrays))
    with pytest.raises(AssertionError, match="plain chunk is wrong"):
        check(answers(tmp_path / "root"), good, "exchanged")

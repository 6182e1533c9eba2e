"""What a library is given under a name comes back by its reference in a prompt, with its chunk, until it is replaced.

The syntax of references; a tenant's files with their quota; an operator's versions while they are held; retrieval.
"""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalContextManager=false

import concurrent.futures
import io
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch_jax.cache import chunk_id
from kvpatch_jax.errors import InputError, NotFiniteError, ShapeError, StoreError
from kvpatch_jax.store import (
    ChunkStore,
    DynamicLibrary,
    ExactRetriever,
    Linker,
    Reference,
    StaticLibrary,
    escape,
    fetch,
    open_remote,
    parse_prompt,
    pooled,
)
from kvpatch_jax.store.libraries import ENTRY_BYTES
from tests.shared.arrays import placed
from tests.store.store_cases import KEY, MODEL, chunk_of, expires_of, same_chunk

PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
TEXTS = st.text(st.sampled_from("IMAGETXOKNS#\\@{}_.-a1 é\n"), max_size=60) | st.text(max_size=60)


@pytest.fixture
def library(store: ChunkStore) -> StaticLibrary:
    return StaticLibrary(store, quota="1 MB")


@pytest.fixture
def versions(folder: Path) -> Iterator[DynamicLibrary]:
    """An operator's library, in a tenant of its own."""
    with ChunkStore(folder / "root", tenant="operator") as store:
        yield DynamicLibrary(store)


def png(pixels: np.ndarray) -> bytes:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def version_count(library: DynamicLibrary, name: str) -> int:
    entry = library.store.names.entry("dynamic", "TEXT", name, version=1).partition("/")[0]
    return len(library.store.objects.with_prefix(f"{entry}/"))


# -------------------------------------------------------------------------------------------------------- references


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("See IMAGE#LOUVRE2025.", ["See ", Reference("IMAGE", "LOUVRE2025"), "."]),
        ("IMAGE#a.b-c.", [Reference("IMAGE", "a.b-c"), "."]),
        ("TEXT#HOTEL@12, go", [Reference("TEXT", "HOTEL", 12), ", go"]),
        ("TEXT#HOTEL@0", [Reference("TEXT", "HOTEL"), "@0"]),
        ("IMAGE#{my photo.png}@3!", [Reference("IMAGE", "my photo.png", 3), "!"]),
        ("IMAGE#ATEXT#B", [Reference("IMAGE", "ATEXT"), "#B"]),
        ("IMAGE#" + "a" * 201, ["IMAGE#" + "a" * 201]),
        ("IMAGE# is a word, ISSUE#12 too, MYIMAGE#X", ["IMAGE# is a word, ISSUE#12 too, MYIMAGE#X"]),
        (r"IMAGE\#A and IMAGE\\#A", [r"IMAGE#A and IMAGE\#A"]),
    ],
)
def test_prompts_are_parsed_by_the_grammar(prompt: str, expected: list):
    assert parse_prompt(prompt) == expected


@given(TEXTS)
def test_escaped_text_stays_text_and_references_are_parsed_as_they_are_written(text: str):
    assert parse_prompt(escape(text)) == ([text] if text else [])
    segments = parse_prompt(text)
    written = "".join(escape(part) if isinstance(part, str) else f"{part}\n" for part in segments)
    references = [part for part in segments if isinstance(part, Reference)]
    assert [part for part in parse_prompt(written) if isinstance(part, Reference)] == references


# ---------------------------------------------------------------------------------------------------- static libraries


def test_contents_come_back(folder: Path):
    image = png(PIXELS)
    contents: list[tuple[Any, Any, Any]] = [  # what is put, its kind, and what comes back
        ("text ü", "TEXT", "text ü"),
        (PIXELS, "IMAGE", PIXELS),
        (placed(PIXELS), "IMAGE", PIXELS),
        (image, "IMAGE", image),
        (b"%PDF-", "FILE", b"%PDF-"),
        ([1, 2, 2**40], "TOKENS", (1, 2, 2**40)),
        (np.array([1, 2, 3]), "TOKENS", np.array([1, 2, 3])),
        (np.ones((2, 3), np.float32), "IMAGE", np.ones((2, 3), np.float32)),
    ]
    names = [f"name {number}" for number in range(len(contents))]
    with ChunkStore(folder, key=KEY) as store:
        library = StaticLibrary(store, quota="1 MB")
        for name, (content, kind, _) in zip(names, contents, strict=True):
            assert str(library.put(name, content, vector=np.array([0.25, 2]))) == f"{kind}#{{{name}}}"
    with ChunkStore(folder, key=KEY) as store:
        library = StaticLibrary(store, quota=1)
        for name, (content, kind, expected) in zip(names, contents, strict=True):
            resource = library.get(kind, name)
            assert type(resource.content) is type(expected)
            assert np.array_equal(resource.content, expected)
            assert resource.chunk_id(MODEL) == chunk_id(MODEL, content)
            assert library.get("TEXT" if kind != "TEXT" else "IMAGE", name) is None
        assert np.array_equal(library.get("IMAGE", names[3]).item, PIXELS)
        assert library.get("TOKENS", names[6]).item == [1, 2, 3]
        listed = dict(library.vectors())
        assert sorted(listed) == sorted(
            f"{kind}#{{{name}}}" for name, (_, kind, _) in zip(names, contents, strict=True)
        )
        assert all(vector.dtype == np.float32 and vector.tolist() == [0.25, 2] for vector in listed.values())


@pytest.mark.usefixtures("unchecked")
def test_files_are_read_from_paths_and_what_cannot_be_stored_is_refused(library: StaticLibrary, tmp_path: Path):
    wrong: list[tuple[tuple, dict, type[Exception]]] = [
        *((("A", content), {}, InputError) for content in (None, [1.5], "", np.empty((0, 3)))),
        (("A", "text"), {"kind": "IMAGE"}, InputError),
        (("a{b", "text"), {}, InputError),
        (("A", tmp_path / "missing.png"), {}, InputError),
        (("A", "a.png"), {}, InputError),  # a path is to be said
        (("A", np.ones((2, 2), np.complex64)), {"kind": "FILE"}, ShapeError),
        (("A", "text"), {"vector": np.array([np.nan])}, NotFiniteError),
    ]
    for arguments, options, error in wrong:
        with pytest.raises(error):
            library.put(*arguments, **options)
    assert library.entries() == []
    (tmp_path / "a.png").write_bytes(png(PIXELS))
    assert library.put("A", tmp_path / "a.png").kind == "IMAGE"
    assert library.get("IMAGE", "A").content == png(PIXELS)
    assert library.put("A", "a.png", kind="TEXT").kind == "TEXT"
    assert library.put("A", "text", kind="FILE").kind == "FILE"


def test_a_quota_is_used_to_its_last_byte_and_replacing_counts_once(store: ChunkStore):
    library = StaticLibrary(store, quota=2 * ENTRY_BYTES + 12_000)
    library.put("A", b"x" * 9000)
    library.put("A", b"y" * 9000)
    assert [entry.nbytes for entry in library.entries()] == [ENTRY_BYTES + 9000]
    for name, size in (("B", 3001), ("A", 12_000 + ENTRY_BYTES + 1)):
        with pytest.raises(StoreError, match="within the quota"):
            library.put(name, b"z" * size)
    with pytest.raises(StoreError, match="within the quota"):
        library.put("C", "small", chunk=chunk_of(tokens=200))
    assert not store.contains("B", MODEL)  # not the chunk either
    assert [str(entry.reference) for entry in library.entries()] == ["FILE#A"]
    assert library.get("FILE", "A").content == b"y" * 9000
    library.put("B", b"z" * 3000)  # exactly the rest
    assert library.delete("FILE", "A")
    assert not library.delete("FILE", "A")

    def put(number: int) -> bool:
        try:
            StaticLibrary(store, quota=10 * (ENTRY_BYTES + 100)).put(f"file {number}", b"x" * 100)
        except StoreError:
            return False
        return True

    library.delete("FILE", "B")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(put, range(16))) == len(library.entries()) == 10


def test_entries_expire_and_give_their_room_back(store: ChunkStore, clock):
    library = StaticLibrary(store, quota=ENTRY_BYTES + 20_000, ttl=10.0)
    library.put("A", b"x" * 2000, chunk=chunk_of())
    assert library.get("FILE", "A") is not None
    assert expires_of(store) == [clock.now + 10] * 2
    clock.now += 10
    assert library.get("FILE", "A") is None
    assert store.get("B", MODEL) is None
    assert library.entries() == []
    StaticLibrary(store, quota=library.quota).put("B", b"x" * 20_000)
    assert [str(entry.reference) for entry in library.entries()] == ["FILE#B"]


def test_chunks_go_with_their_last_entry(store: ChunkStore, library: StaticLibrary, clock):
    library.put("A", "one", chunk=chunk_of())
    StaticLibrary(store, quota="1 MB", ttl=10).put("B", "two", chunk=chunk_of())  # the first keeps it
    DynamicLibrary(store).publish("C", "three", chunk=chunk_of())
    clock.now += 11
    library.delete("TEXT", "A")
    assert store.contains("B", MODEL)
    DynamicLibrary(store).withdraw("TEXT", "C")
    assert not store.contains("B", MODEL)
    library.put("A", "one", chunk=chunk_of())
    library.put("A", "another")
    assert not store.contains("B", MODEL)
    for _ in range(2):
        library.put("A", chunk=chunk_of(), kind="TEXT")
    assert store.contains("B", MODEL)


# --------------------------------------------------------------------------------------------------- dynamic libraries


def test_versions_stay_while_they_are_held(versions: DynamicLibrary):
    store = versions.store
    assert str(versions.publish("A", "one", chunk=chunk_of("c1", 1))) == "TEXT#A@1"
    first = versions.open("TEXT", "A")
    versions.publish("A", "two", chunk=chunk_of("c2", 2))
    versions.publish("A", "three", chunk=chunk_of("c3", 3))
    assert versions.open("TEXT", "A", 2) is None  # nobody had it open
    assert not store.contains("c2", MODEL)
    assert same_chunk(store.get("c1", MODEL), chunk_of("c1", 1))
    with versions.open("TEXT", "A") as current, versions.open("TEXT", "A", 1) as before:
        assert (current.content, before.content) == ("three", "one")
    assert version_count(versions, "A") == 2
    first.close()
    first.close()
    assert versions.open("TEXT", "A", 1) is None
    assert version_count(versions, "A") == 1
    assert (store.contains("c1", MODEL), store.contains("c3", MODEL)) == (False, True)

    # Withdrawing leaves readers alone.
    current = versions.open("TEXT", "A")
    versions.publish("B", "other", kind="FILE", vector=np.array([1.0]))
    assert versions.withdraw("TEXT", "A")
    assert not versions.withdraw("TEXT", "A")
    assert versions.open("TEXT", "A") is None
    assert [str(entry.reference) for entry in versions.entries()] == ["FILE#B@1"]
    assert [name for name, _ in versions.vectors()] == ["FILE#B"]
    assert current.resource.content == "three"
    current.close()
    assert versions.publish("A", "again").version == 5
    assert version_count(versions, "A") == 1
    store.delete_tenant()
    assert versions.open("TEXT", "A") is None
    assert versions.publish("A", "anew").version == 1


@pytest.mark.parametrize("machines", [1, 2])
def test_every_publisher_makes_a_version_of_its_own(folder: Path, machines: int):
    """Of threads of one machine, and of machines that share a remote store."""
    options: dict[str, Any] = {"remote": open_remote("memory://") if machines == 2 else None, "secret": KEY}
    with ChunkStore(folder / "a", **options) as here, ChunkStore(folder / f"{machines}", **options) as there:
        first, second = DynamicLibrary(here), DynamicLibrary(there if machines == 2 else here)
        assert first.publish("A", "one").version == 1
        before = second.open("TEXT", "A")
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(library.publish, "A", "text") for library in (first, second) * 4]
        versions = {future.result().version for future in futures}
        assert len(versions) == 8
        assert min(versions) > 1
        assert machines == 2 or versions == set(range(2, 10))
        last = second.publish("A", "last").version
        assert last > max(versions)
        with first.open("TEXT", "A") as resource:
            assert (resource.content, resource.reference.version) == ("last", last)
        assert before.resource.content == "one"
        before.close()
        for store in (here, there):
            store.flush()
        assert version_count(first, "A") == 1
        assert second.withdraw("TEXT", "A")
        assert first.open("TEXT", "A") is None
        StaticLibrary(here, quota="1 MB").put("A", "a file")
        here.flush()
        library = StaticLibrary(second.store, quota="1 MB")
        assert library.get("TEXT", "A").content == "a file"
        assert library.delete("TEXT", "A")
        second.store.flush()
        assert library.get("TEXT", "A") is None


def test_a_number_that_another_machine_has_used_and_deleted_is_not_used_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    options: dict[str, Any] = {"remote": open_remote("memory://"), "secret": KEY}
    with ChunkStore(folder / "a", **options) as here, ChunkStore(folder / "b", **options) as there:
        first, second = DynamicLibrary(here), DynamicLibrary(there)
        assert [first.publish("A", "text").version for _ in range(3)] == [1, 2, 3]
        here.flush()
        # The second machine has listed the versions before the first one published 2 and 3, and deleted 2.
        listed, versions = iter([[1]]), second._versions
        monkeypatch.setattr(second, "_versions", lambda *arguments: next(listed, None) or versions(*arguments))
        assert second.publish("A", "late").version == 4
        assert first.open("TEXT", "A").resource.content == "late"


def test_a_version_that_is_written_counts_though_no_listing_follows(store: ChunkStore, monkeypatch: pytest.MonkeyPatch):
    library = DynamicLibrary(store)
    answers = iter([[], StoreError("refused")])

    def versions(*_: Any) -> list[int]:
        answer = next(answers)
        if isinstance(answer, StoreError):
            raise answer
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(library, "_versions", versions)
        assert library.publish("A", "text").version == 1
    assert library.open("TEXT", "A").resource.content == "text"


def test_another_process_holds_its_version_until_it_dies(store: ChunkStore, monkeypatch: pytest.MonkeyPatch):
    library = DynamicLibrary(store)
    library.publish("A", "one", chunk=chunk_of("c1"))
    with subprocess.Popen(["sleep", "60"]) as process:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: process.pid)  # it stands for one that opens the version itself
            version = library.open("TEXT", "A")
        library.publish("A", "two")
        assert library.collect() == 0
        with library.open("TEXT", "A", 1) as resource:
            assert resource.content == version.resource.content == "one"
        assert version_count(library, "A") == 2
        process.kill()
    assert store.contains("c1", MODEL)
    assert library.collect() == 1
    assert not store.contains("c1", MODEL)
    assert version_count(library, "A") == 1


# ----------------------------------------------------------------------------------------------------------- prompts


def test_a_prompt_becomes_texts_and_chunks(library: StaticLibrary, versions: DynamicLibrary):
    library.put("LOUVRE", PIXELS)
    versions.publish("HOTEL", "a hotel by the river")
    versions.publish("HOTEL", "a hotel on the hill")
    linker = Linker(MODEL, library, versions)
    with linker.link("Is TEXT#HOTEL near IMAGE#LOUVRE? TEXT#HOTEL@2 TOKENS\\#1") as linked:
        assert [part for part in linked.segments if isinstance(part, str)] == ["Is ", " near ", "? ", " TOKENS#1"]
        hotel, louvre, again = linked.chunks
        assert (hotel.library, louvre.library, again.library) == ("dynamic", "static", "dynamic")
        assert hotel.id == again.id == chunk_id(MODEL, "a hotel on the hill")
        assert louvre.id == chunk_id(MODEL, PIXELS)
        assert hotel.resource.reference == Reference("TEXT", "HOTEL", 2)
        assert linked.items[1] == "a hotel on the hill"
        assert np.array_equal(linked.items[3], PIXELS)
        versions.publish("HOTEL", "no hotel")
        linker.link("TEXT#HOTEL@2").close()  # the open prompt holds it
    with pytest.raises(InputError, match="no library has it"):
        linker.link("TEXT#HOTEL@2")
    assert linker.resolve("IMAGE#LOUVRE").chunks[0].id == louvre.id
    with pytest.raises(InputError, match="KIND#NAME"):
        linker.resolve("IMAGE#LOUVRE and more")

    # The tenant's names precede the operator's.
    library.put("HOTEL", "the tenant's")
    with linker.link("TEXT#HOTEL TEXT#HOTEL@3") as linked:
        assert linked.items == ["the tenant's", " ", "no hotel"]

    # Near names of the tenant are suggested, and none of the operator.
    versions.publish("LOUVRF", PIXELS)
    with pytest.raises(InputError, match=r"IMAGE#LOUVRES: .*expected one of IMAGE#LOUVRE, ") as caught:
        linker.link("IMAGE#LOUVRES")
    assert "LOUVRF" not in str(caught.value)


def test_chunks_of_a_prompt_come_from_where_they_are(library: StaticLibrary, versions: DynamicLibrary):
    library.put("LOUVRE", PIXELS, chunk=chunk_of(chunk_id(MODEL, PIXELS), 1))
    versions.publish("HOTEL", "a hotel", chunk=chunk_of("a hotel's", 2))
    StaticLibrary(library.store, quota="1 MB", ttl=100.0).put("NEW", "not computed yet")
    computed = []

    def compute(misses: Any) -> list[Any]:
        computed.extend(miss.item for miss in misses)
        return [chunk_of(miss.request.id, 3) for miss in misses]

    with Linker(MODEL, library, versions).link("IMAGE#LOUVRE TEXT#HOTEL TEXT#NEW") as linked:
        for last in ("computed", "store"):
            results = fetch(library.store, linked.requests, compute)
            assert [result.source for result in results] == ["store", "shared", last]
            assert same_chunk(results[1].chunk, chunk_of("a hotel's", 2))
            library.store.flush()
    assert computed == ["not computed yet"]
    assert not library.store.contains("a hotel's", MODEL)  # the operator's is not copied
    name = library.store.names.canonical(MODEL, chunk_id(MODEL, "not computed yet"))
    assert library.store.objects.read(name).expires is not None  # with its file


def test_a_retriever_returns_the_nearest_first():
    rng = np.random.default_rng(0)
    vectors, retriever = rng.standard_normal((200, 16)), ExactRetriever(16)
    for number, vector in enumerate(vectors):
        retriever.add(f"{number:03d}", rng.standard_normal(16))
        retriever.add(f"{number:03d}", 2.0**100 * vector)  # replaces; its square overflows
    retriever.add("twin of 7", vectors[7])
    retriever.remove("003")
    cosines = vectors @ vectors[7] / np.linalg.norm(vectors, axis=1) / np.linalg.norm(vectors[7])
    cosines[3] = -2
    expected = [f"{number:03d}" for number in np.argsort(-cosines, kind="stable")]
    ids, scores = retriever.search(vectors[7], 10)
    assert ids == [expected[0], "twin of 7", *expected[1:9]]
    assert np.allclose(scores[2:], np.sort(cosines)[::-1][1:9], atol=1e-6)
    assert len(retriever) == 200
    assert np.allclose(pooled(np.array([[3.0, 0], [0, 4], [9, 9]]), 2), [0.6, 0.8])

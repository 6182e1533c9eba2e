"""References in prompts: the grammar, what they lead to and how they are found; nobody hears of others' names."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpatch_jax as kvp
from kvpatch_jax.cache import chunk_id
from kvpatch_jax.errors import InputError, NotFiniteError, ShapeError
from kvpatch_jax.store import ChunkStore
from kvpatch_jax.store.fetch import fetch
from kvpatch_jax.store.libraries import DynamicLibrary, StaticLibrary
from kvpatch_jax.store.linker import Linker
from kvpatch_jax.store.references import Reference, check_name, escape, parse_prompt
from kvpatch_jax.store.retriever import ExactRetriever, Retriever, pooled
from tests.shared.examples import examples

LAYOUT = kvp.KVLayout.gqa(3, 2, 16, kvp.Rope(1e4, 16))
MODEL = "tiny"
PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
_names = st.text(st.characters(blacklist_categories=("C", "Z")), min_size=1, max_size=30).filter(
    lambda name: "{" not in name and "}" not in name
)
_texts = st.text(st.sampled_from("IMAGETXOKNS#\\@{}_.-a1 é\n"), max_size=60) | st.text(max_size=60)


def chunk_of(id: str, seed: int) -> kvp.Chunk:
    rng = np.random.default_rng(seed)
    kv = {name: rng.standard_normal((3, 8, 2, 16)).astype(np.float32) for name in LAYOUT.names}
    return kvp.Chunk(kv, np.arange(8, dtype=np.float32), 8, 8, id, LAYOUT, MODEL)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("", []),
        ("plain", ["plain"]),
        ("See IMAGE#LOUVRE2025.", ["See ", Reference("IMAGE", "LOUVRE2025"), "."]),
        ("IMAGE#a.b-c.", [Reference("IMAGE", "a.b-c"), "."]),
        ("TEXT#HOTEL@12, go", [Reference("TEXT", "HOTEL", 12), ", go"]),
        ("TEXT#HOTEL@2x", [Reference("TEXT", "HOTEL"), "@2x"]),
        ("TEXT#HOTEL@0", [Reference("TEXT", "HOTEL"), "@0"]),
        ("IMAGE#{my photo.png}@3!", [Reference("IMAGE", "my photo.png", 3), "!"]),
        ("IMAGE#ATEXT#B", [Reference("IMAGE", "ATEXT"), "#B"]),
        ("IMAGE#A IMAGE#B", [Reference("IMAGE", "A"), " ", Reference("IMAGE", "B")]),
        ("IMAGE#{}", ["IMAGE#{}"]),
        ("IMAGE#{a\nb}", ["IMAGE#{a\nb}"]),
        ("IMAGE#" + "a" * 201, ["IMAGE#" + "a" * 201]),
        ("IMAGE# is a word, ISSUE#12 too, MYIMAGE#X", ["IMAGE# is a word, ISSUE#12 too, MYIMAGE#X"]),
        (r"IMAGE\#A and IMAGE\\#A", [r"IMAGE#A and IMAGE\#A"]),
        (r"C:\dir\#x", [r"C:\dir\#x"]),
    ],
)
def test_prompts_are_parsed_by_the_grammar(prompt, expected):
    assert parse_prompt(prompt) == expected


@given(_texts)
def test_escaped_text_stays_text(text):
    assert parse_prompt(escape(text)) == ([text] if text else [])


@given(_texts)
def test_parsed_references_are_formatted_and_parsed_again(prompt):
    segments = parse_prompt(prompt)
    written = "".join(escape(part) if isinstance(part, str) else f"{part}\n" for part in segments)
    expected = [part for part in parse_prompt(written) if isinstance(part, Reference)]
    assert expected == [part for part in segments if isinstance(part, Reference)]


@pytest.fixture
def libraries(tmp_path: Path):
    with ChunkStore(tmp_path, tenant="acme") as tenant, ChunkStore(tmp_path, tenant="operator") as operator:
        yield StaticLibrary(tenant, quota="1 MB"), DynamicLibrary(operator)


def test_a_prompt_becomes_texts_and_chunks(libraries):
    static, dynamic = libraries
    static.put("LOUVRE", PIXELS)
    dynamic.publish("HOTEL", "a hotel by the river")
    dynamic.publish("HOTEL", "a hotel on the hill")
    linker = Linker(MODEL, static, dynamic)
    with linker.link("Is TEXT#HOTEL near IMAGE#LOUVRE? TEXT#HOTEL@2 TOKENS\\#1") as linked:
        assert [part for part in linked.segments if isinstance(part, str)] == ["Is ", " near ", "? ", " TOKENS#1"]
        hotel, louvre, again = linked.chunks
        assert (hotel.library, louvre.library, again.library) == ("dynamic", "static", "dynamic")
        assert hotel.id == again.id == chunk_id(MODEL, "a hotel on the hill")
        assert louvre.id == chunk_id(MODEL, PIXELS)
        assert hotel.resource.reference == Reference("TEXT", "HOTEL", 2)
        assert linked.items[1] == "a hotel on the hill"
        assert np.array_equal(linked.items[3], PIXELS)
        dynamic.publish("HOTEL", "no hotel")
        linker.link("TEXT#HOTEL@2").close()  # held by the open prompt
    with pytest.raises(InputError, match="no library has it"):
        linker.link("TEXT#HOTEL@2")
    assert linker.resolve("IMAGE#LOUVRE").chunks[0].id == louvre.id
    with pytest.raises(InputError, match="KIND#NAME"):
        linker.resolve("IMAGE#LOUVRE and more")


def test_the_tenants_names_precede_the_operators(libraries):
    static, dynamic = libraries
    dynamic.publish("X", "the operator's")
    linker = Linker(MODEL, static, dynamic)
    with linker.link("TEXT#X") as linked:
        assert linked.items == ["the operator's"]
    static.put("X", "my own")
    with linker.link("TEXT#X TEXT#X@1") as linked:
        assert linked.items == ["my own", " ", "the operator's"]


def test_chunks_come_from_where_they_are(libraries):
    static, dynamic = libraries
    static.put("LOUVRE", PIXELS, chunk=chunk_of(chunk_id(MODEL, PIXELS), 1))
    dynamic.publish("HOTEL", "a hotel", chunk=chunk_of("a hotel's", 2))
    StaticLibrary(static.store, quota="1 MB", ttl=100.0).put("NEW", "not computed yet")
    computed = []

    def compute(misses):
        computed.extend(miss.item for miss in misses)
        return [chunk_of(miss.request.id, 3) for miss in misses]

    with Linker(MODEL, static, dynamic).link("IMAGE#LOUVRE TEXT#HOTEL TEXT#NEW") as linked:
        for last in ("computed", "store"):
            results = fetch(static.store, linked.requests, compute)
            assert [result.source for result in results] == ["store", "shared", last]
            assert np.array_equal(results[1].chunk.kv["k"], chunk_of("x", 2).kv["k"])
            static.store.flush()
    assert computed == ["not computed yet"]
    name = static.store.names.canonical(MODEL, chunk_id(MODEL, "not computed yet"))
    stored = static.store.objects.read(name)
    assert stored is not None
    assert stored.expires is not None  # with its file


def test_an_unknown_reference_names_near_ones(libraries):
    static, dynamic = libraries
    static.put("LOUVRE2025", PIXELS)
    dynamic.publish("LOUVRE2024", PIXELS)
    linker = Linker(MODEL, static, dynamic)
    with pytest.raises(InputError, match=r"#LOUVRE2026: .*expected one of IMAGE#LOUVRE2025, ") as caught:
        linker.link("IMAGE#LOUVRE2026")
    assert "2024" not in str(caught.value)
    for unknown in ("TEXT#LOUVRE2025", "IMAGE#LOUVRE2024@7"):
        with pytest.raises(InputError, match=unknown):
            linker.link(unknown)


@examples(5)
@given(st.lists(_names, min_size=1, max_size=4, unique=True), _names)
def test_another_tenants_names_never_leak(tmp_path_factory, names, asked):
    root = tmp_path_factory.mktemp("store")
    with ChunkStore(root, tenant="a") as first, ChunkStore(root, tenant="b") as second:
        theirs, mine = StaticLibrary(first, quota="1 MB"), StaticLibrary(second, quota="1 MB")
        for name in names:
            theirs.put(name, f"secret of {name}")
        assert mine.entries() == []
        assert mine.get("TEXT", asked) is None
        assert not mine.delete("TEXT", names[0])
        for name in {asked, *names}:
            written = str(Reference(*check_name("TEXT", name)))
            with pytest.raises(InputError, match="no library has it") as caught:
                Linker(MODEL, mine).link(written)
            assert str(caught.value) == f"{written}: no library has it; expected a reference that is there"
        parts = {path.name for path in root.rglob("*") if "data" in path.parts[len(root.parts) : -1]}
        assert [part for part in parts if not re.fullmatch(r"[0-9a-f]{2}|[0-9a-f]{24}", part)] == []


def test_a_retriever_returns_the_nearest_first():
    rng = np.random.default_rng(0)
    vectors, retriever = rng.standard_normal((200, 16)), ExactRetriever(16)
    assert isinstance(retriever, Retriever)
    assert retriever.search(vectors[0], 3)[0] == []
    for number, vector in enumerate(vectors):
        retriever.add(f"{number:03d}", rng.standard_normal(16))
        retriever.add(f"{number:03d}", 2.0**100 * vector)  # replaces; its square overflows
    retriever.add("twin of 7", vectors[7])
    assert retriever.remove("003")
    assert not retriever.remove("003")
    cosines = vectors @ vectors[7] / np.linalg.norm(vectors, axis=1) / np.linalg.norm(vectors[7])
    cosines[3] = -2
    expected = [f"{number:03d}" for number in np.argsort(-cosines, kind="stable")]
    ids, scores = retriever.search(vectors[7], 10)
    assert ids == [expected[0], "twin of 7", *expected[1:9]]
    assert np.allclose(scores[2:], np.sort(cosines)[::-1][1:9], atol=1e-6)
    assert len(retriever.search(vectors[7], 1000)[0]) == len(retriever) == 200


@pytest.mark.usefixtures("unchecked")
def test_bad_vectors_are_refused():
    retriever = ExactRetriever(2)
    for wrong, error in ((np.ones(3), ShapeError), (np.zeros(2), InputError), (np.array([1, np.inf]), NotFiniteError)):
        with pytest.raises(error):
            retriever.add("a", wrong)
        with pytest.raises(error):
            retriever.search(wrong, 1)
    with pytest.raises(InputError, match="k 0"):
        retriever.search(np.ones(2), 0)
    with pytest.raises(ShapeError, match="at least one token"):
        pooled(np.ones((0, 4)))
    assert np.allclose(pooled(np.array([[3, 0], [0, 4], [9, 9]]), 2), [0.6, 0.8])

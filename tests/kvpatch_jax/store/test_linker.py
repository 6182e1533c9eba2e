"""References in prompts: the grammar, escaping, and what they lead to; nobody hears of another tenant's names."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import BACKBONE, chunk_of, same, same_chunk

from kvpatch_jax.errors import UnknownReferenceError
from kvpatch_jax.store import (
    ChunkStore,
    DynamicLibrary,
    LinkedChunk,
    Linker,
    Reference,
    StaticLibrary,
    chunk_id,
    escape,
    fetch,
    parse_prompt,
)
from kvpatch_jax.store.libraries.references import check_name

PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
_names = st.text(st.characters(blacklist_categories=("C", "Z")), min_size=1, max_size=30).filter(
    lambda name: "{" not in name and "}" not in name
)
_texts = st.text(st.sampled_from("IMAGETXOKNS#\\@{}_.-a1 é\n"), max_size=60) | st.text(max_size=60)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("", []),
        ("plain", ["plain"]),
        ("IMAGE#LOUVRE2025", [Reference("IMAGE", "LOUVRE2025")]),
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
    """Names keep their meaning whatever stands around them."""
    segments = parse_prompt(prompt)
    written = "".join(escape(part) if isinstance(part, str) else f"{part}\n" for part in segments)
    expected = [part for part in parse_prompt(written) if isinstance(part, Reference)]
    assert expected == [part for part in segments if isinstance(part, Reference)]


@pytest.fixture
def libraries(tmp_path: Path):
    with ChunkStore(tmp_path, tenant="acme") as own, ChunkStore(tmp_path, tenant="operator") as operator:
        yield StaticLibrary(own, quota=1 << 20), DynamicLibrary(operator)


def test_a_prompt_becomes_texts_and_chunks(libraries):
    static, dynamic = libraries
    static.put("LOUVRE", PIXELS)
    dynamic.publish("HOTEL", "a hotel by the river")
    dynamic.publish("HOTEL", "a hotel on the hill")
    linker = Linker(BACKBONE, static, dynamic)
    with linker.link("Is TEXT#HOTEL near IMAGE#LOUVRE? TEXT#HOTEL@2 TOKENS\\#1") as linked:
        texts = [segment for segment in linked.segments if isinstance(segment, str)]
        assert texts == ["Is ", " near ", "? ", " TOKENS#1"]
        hotel, louvre, again = linked.chunks
        assert (hotel.library, louvre.library, again.library) == ("dynamic", "static", "dynamic")
        assert hotel.id == again.id == chunk_id(BACKBONE, "a hotel on the hill")
        assert louvre.id == chunk_id(BACKBONE, PIXELS)
        assert hotel.resource.reference == Reference("TEXT", "HOTEL", 2)
        assert linked.items[1] == "a hotel on the hill"
        assert same(linked.items[3], PIXELS)
        assert static.store.tenant_disk.pinned(_pin_key(static.store, louvre))
    assert not static.store.tenant_disk.pinned(_pin_key(static.store, louvre))
    assert linker.resolve("IMAGE#LOUVRE").chunks[0].id == louvre.id
    with pytest.raises(UnknownReferenceError, match="KIND#NAME"):
        linker.resolve("IMAGE#LOUVRE and more")


def _pin_key(store: ChunkStore, chunk: LinkedChunk) -> str:
    name = store.names.canonical(chunk.backbone, chunk.id)
    return f"{name.folder}/{name.chunk}"


def test_the_tenants_names_precede_the_operators(libraries):
    static, dynamic = libraries
    dynamic.publish("X", "the operator's")
    linker = Linker(BACKBONE, static, dynamic)
    with linker.link("TEXT#X") as linked:
        assert linked.items == ["the operator's"]
    static.put("X", "my own")
    with linker.link("TEXT#X TEXT#X@1") as linked:
        assert linked.items == ["my own", " ", "the operator's"]


def test_chunks_come_from_where_they_are(tmp_path: Path):
    now = [1e9]
    with (
        ChunkStore(tmp_path, tenant="acme", clock=lambda: now[0]) as own,
        ChunkStore(tmp_path, tenant="op") as operator,
    ):
        _check_sources(StaticLibrary(own, quota=1 << 20), DynamicLibrary(operator))
        assert own.get(chunk_id(BACKBONE, "not computed yet"), BACKBONE) is not None
        now[0] += 101
        assert own.get(chunk_id(BACKBONE, "not computed yet"), BACKBONE) is None  # it expired with its file
        assert operator.get("a hotel's", BACKBONE) is not None


def _check_sources(static: StaticLibrary, dynamic: DynamicLibrary) -> None:
    mine, theirs = chunk_of(chunk_id(BACKBONE, PIXELS), 1), chunk_of("a hotel's", 2)
    static.put("LOUVRE", PIXELS, chunk=mine, ttl=100)
    dynamic.publish("HOTEL", "a hotel", chunk=theirs)
    static.put("NEW", "not computed yet", ttl=100)
    made = []

    def compute(misses):
        made.extend(miss.item for miss in misses)
        return [chunk_of(miss.request.id, 3) for miss in misses]

    with Linker(BACKBONE, static, dynamic).link("IMAGE#LOUVRE TEXT#HOTEL TEXT#NEW") as linked:
        for last in ("computed", "store"):
            got = fetch(static.store, linked.requests, compute)
            assert [fetched.source for fetched in got] == ["store", "shared", last]
            assert same_chunk(got[0].chunk, mine)
            assert same_chunk(got[1].chunk, theirs)
            static.store.flush()
        assert made == ["not computed yet"]


def test_an_unknown_reference_names_near_ones(libraries):
    static, dynamic = libraries
    static.put("LOUVRE2025", PIXELS)
    dynamic.publish("LOUVRE2024", PIXELS)
    linker = Linker(BACKBONE, static, dynamic)
    with pytest.raises(
        UnknownReferenceError, match=r"IMAGE#LOUVRE2026: .*expected one of IMAGE#LOUVRE2025, "
    ) as caught:
        linker.link("IMAGE#LOUVRE2026")
    assert "2024" not in str(caught.value)
    with pytest.raises(UnknownReferenceError, match="TEXT#LOUVRE2025"):
        linker.link("TEXT#LOUVRE2025")
    with pytest.raises(UnknownReferenceError, match="@7"):
        linker.link("IMAGE#LOUVRE2024@7")
    with pytest.raises(UnknownReferenceError):
        Linker(BACKBONE).link("IMAGE#LOUVRE2025")


_PARTS = (
    r"obj|lib|tmp|quarantine|STORE(\.copy)?\.json|((names|evict)\.)?lock|static"
    r"|[0-9a-f]{2}|[0-9a-f]{32}|[0-9a-f]{64}\.entry\.safetensors"
)
"""Words that are the same in every store, and digests."""


@settings(max_examples=10, deadline=None)
@given(st.lists(_names, min_size=1, max_size=4, unique=True), _names)
def test_another_tenants_names_never_leak(tmp_path_factory, names, asked):
    root = tmp_path_factory.mktemp("store")
    with ChunkStore(root, tenant="a") as one, ChunkStore(root, tenant="b") as two:
        theirs, mine = StaticLibrary(one, quota=1 << 20), StaticLibrary(two, quota=1 << 20)
        for name in names:
            theirs.put(name, f"secret of {name}")
        assert mine.entries() == []
        assert mine.used == 0
        assert mine.get("TEXT", asked) is None
        assert not mine.delete("TEXT", names[0])
        for name in {asked, *names}:
            written = str(Reference(*check_name("TEXT", name)))
            with pytest.raises(UnknownReferenceError) as caught:
                Linker(BACKBONE, mine).link(written)
            assert str(caught.value) == f"{written}: no library has it; expected a reference that is there"
        parts = {part for path in root.rglob("*") for part in path.relative_to(root).parts}
        assert [part for part in parts if not re.fullmatch(_PARTS, part)] == []

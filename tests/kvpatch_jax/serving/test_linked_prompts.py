"""MPIC's serving path over a temporary store, end to end on a tiny backbone, and VLCache's caches by digest."""

import copy
import functools
from typing import Any

import numpy as np
import pytest
from session_cases import image_of, reader
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transition_cases import LAYOUT

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, LayoutError, UnknownReferenceError
from kvpatch_jax.repair import RepairBudget, behind_substitute, encoder_cached_reprefill, vlcache
from kvpatch_jax.serving.linked_prompts import PromptServer, RequestCache, RetrievalOptions
from kvpatch_jax.store import ChunkStore, DynamicLibrary, ExactRetriever, StaticLibrary

PROMPT = "w7 w11 IMAGE#ONE w20 w21 IMAGE#TWO w9 w5"
STEPS, WIDTH = 4, 8
Clock = list[float]


@functools.cache
def backbone() -> Any:
    found = reader()
    found.buckets = None
    return found


def counting_backbone() -> Any:
    """The same backbone, counting its prefills and runs of the tower."""
    inner, counting = backbone(), copy.copy(backbone())
    counting.prefills = counting.encodes = 0

    def prefill(*args: Any, **options: Any) -> Any:
        counting.prefills += 1
        return inner.prefill(*args, **options)

    def encode(**prompt: Any) -> Any:
        counting.encodes += 1
        return inner.encode(**prompt)

    counting.prefill, counting.encode = prefill, encode
    return counting


def beginning_backbone() -> Any:
    """The same backbone, whose tokenizer puts a token of its own in front of a prompt."""
    other = copy.copy(backbone())
    tokenizer = Tokenizer.from_str(other.tokenizer.to_str())
    tokenizer.post_processor = TemplateProcessing(single="w59 $A", special_tokens=[("w59", 59)])
    other.tokenizer = tokenizer
    return other


@pytest.fixture
def clock() -> Clock:
    return [1_000_000.0]


@pytest.fixture
def store(tmp_path, clock):
    with ChunkStore(tmp_path / "store", tenant="one", clock=lambda: clock[0]) as mine:
        yield mine


def library(store: ChunkStore) -> StaticLibrary:
    return StaticLibrary(store, quota=1 << 26)


def exact_ids(contents: list[Any], steps: int) -> list[int]:
    """Greedy answer of a whole prefill."""
    tokens = backbone().embed(**backbone().prepare(contents))
    return np.asarray(backbone().generate(tokens, steps))[0].tolist()


CONTENTS = [kvp.Text("w7 w11"), image_of(1), kvp.Text("w20 w21"), image_of(2), kvp.Text("w9 w5")]


def test_linked_prompts_with_all_tokens_recomputed_give_the_prefilled_answer(store):
    """Positions, embeddings and features of linked chunks are those of the whole prompt; only KV is approximate."""
    server = PromptServer(backbone(), library(store), repair="encoder_cached_reprefill", budget=1.0)
    server.upload("ONE", image_of(1))
    server.upload("TWO", image_of(2))
    assert list(server.answer(PROMPT, STEPS, stop=()).ids) == exact_ids(CONTENTS, STEPS)
    assert list(server.answer("w7 w11 w20", STEPS, stop=()).ids) == exact_ids([kvp.Text("w7 w11 w20")], STEPS)


def test_mpic_serves_stored_files_in_one_forward_and_without_a_prefill(store):
    counting = counting_backbone()
    server = PromptServer(counting, library(store), budget=RepairBudget(tokens=2))
    server.upload("ONE", image_of(1))
    server.upload("TWO", image_of(2))
    before, towers = counting.prefills, counting.encodes
    answer = server.answer(PROMPT, STEPS, stop=())
    assert [record.origin for record in answer.linked] == ["store", "store"]
    assert [record.reference for record in answer.linked] == ["IMAGE#ONE", "IMAGE#TWO"]
    assert (counting.prefills, counting.encodes) == (before, towers)
    # Six words and two tokens of each image, at every layer.
    (repaired,) = answer.repaired
    assert repaired.token_layers.tolist() == [(6 + 2 * 2) * backbone().layout.layers]
    assert len(answer.ids) == STEPS


def test_expired_kv_is_computed_while_the_other_loads_and_an_expired_file_is_unknown(store, clock):
    server = PromptServer(backbone(), library(store), budget=RepairBudget(tokens=2))
    server.upload("ONE", image_of(1), ttl=100.0, kv_ttl=10.0)
    server.upload("TWO", image_of(2))
    fresh = server.answer(PROMPT, STEPS, stop=())
    clock[0] += 20
    later = server.answer(PROMPT, STEPS, stop=())
    assert [record.origin for record in later.linked] == ["computed", "store"]
    assert later.ids == fresh.ids
    clock[0] += 100
    with pytest.raises(UnknownReferenceError, match="IMAGE#ONE"):
        server.answer(PROMPT, STEPS)


def test_a_damaged_file_is_computed_and_the_answer_stays(store, tmp_path):
    server = PromptServer(backbone(), library(store), budget=RepairBudget(tokens=2))
    server.upload("ONE", image_of(1))
    server.upload("TWO", image_of(2))
    expected = server.answer(PROMPT, STEPS, stop=())
    store.close()
    for path in (tmp_path / "store").rglob("*"):
        if path.is_file() and ".kv" in path.name:
            raw = bytearray(path.read_bytes())
            raw[len(raw) // 2] ^= 255
            path.write_bytes(bytes(raw))
    with ChunkStore(tmp_path / "store", tenant="one", clock=lambda: 1_000_000.0) as again:
        found = PromptServer(backbone(), library(again), budget=RepairBudget(tokens=2)).answer(PROMPT, STEPS, stop=())
        assert again.counters["quarantined"] == 2
    assert [record.origin for record in found.linked] == ["computed", "computed"]
    assert found.ids == expected.ids


def test_kv_of_another_content_falls_back_to_inference_without_the_cache(store):
    files = library(store)
    server = PromptServer(backbone(), files, budget=RepairBudget(tokens=2))
    other = kvp.make_chunk(backbone(), [image_of(1, 56)])
    files.put("ONE", image_of(1), chunk=other)
    server.upload("TWO", image_of(2))
    answer = server.answer(PROMPT, STEPS, stop=())
    assert [record.origin for record in answer.linked] == ["prefilled", "prefilled"]
    assert answer.repaired == ()
    assert list(answer.ids) == exact_ids(CONTENTS, STEPS)


def test_users_reach_their_own_files_only_and_bad_prompts_change_nothing(store, tmp_path, unchecked):
    server = PromptServer(backbone(), library(store), budget=RepairBudget(tokens=2))
    server.upload("ONE", image_of(1))
    with ChunkStore(tmp_path / "store", tenant="two") as theirs:
        PromptServer(backbone(), library(theirs)).upload("TWO", image_of(2))
        with pytest.raises(UnknownReferenceError, match="IMAGE#TWO"):
            server.answer(PROMPT, STEPS)
    with pytest.raises(InputError, match="a text behind the last reference"):
        server.answer("w7 IMAGE#ONE", STEPS)
    with pytest.raises(InputError, match="steps"):
        server.answer("w7 IMAGE#ONE w8", -1)
    with pytest.raises(InputError, match="expected one of"):
        PromptServer(backbone(), library(store), repair="none")
    with pytest.raises(InputError, match="no dynamic library"):
        PromptServer(backbone(), library(store), retrieval=RetrievalOptions(None, bool, "w5"))
    with pytest.raises(InputError, match="prefix_caching"):
        PromptServer(backbone(), library(store), repair="prefix_caching", substitute=[kvp.Text("w5")])
    with pytest.raises(InputError, match=r"budget.*got 1000"):
        PromptServer(backbone(), library(store), repair="cacheblend", budget=RepairBudget(tokens=1000)).answer(
            "w7 IMAGE#ONE w8", 1
        )
    assert [str(entry.reference) for entry in server.static.entries()] == ["IMAGE#ONE"]


@pytest.mark.parametrize("repair", ["mpic", "encoder_cached_reprefill", "prefix_caching"])
def test_the_retriever_links_the_operators_chunk_behind_what_was_decoded(store, tmp_path, repair):
    """With everything recomputed, the rest of the answer is what a prefill of all that is in the cache gives."""
    with ChunkStore(tmp_path / "store", tenant="operator") as theirs:
        asked, retriever = [], ExactRetriever(WIDTH)

        def query(vector):
            asked.append(vector)
            return direction

        server = PromptServer(
            backbone(),
            library(store),
            DynamicLibrary(theirs),
            retrieval=RetrievalOptions(retriever, lambda ids: len(ids) == 2, "w30 w31", query),
            repair=repair,
            budget=RepairBudget(tokens=2) if repair == "mpic" else 1.0,
        )
        server.upload("ONE", image_of(1))
        rng = np.random.default_rng(0)
        direction, away = rng.standard_normal((2, WIDTH))
        server.publish("HOTEL", image_of(4), vector=direction)
        server.publish("MUSEUM", image_of(5), vector=away)
        answer = server.answer("w7 IMAGE#ONE w20", 5, stop=())

    assert [(own.reference, own.origin, own.after) for own in answer.linked] == [
        ("IMAGE#ONE", "store", 0),
        ("IMAGE#HOTEL@1", "shared", 2),
    ]
    assert len(asked) == 1
    assert len(answer.ids) == 5
    if repair != "mpic":
        front = [kvp.Text("w7"), image_of(1), kvp.Text("w20")]
        assert list(answer.ids[:2]) == exact_ids(front, 2)
        rest = [*front, list(answer.ids[:2]), image_of(4), kvp.Text("w30 w31")]
        assert list(answer.ids[2:]) == exact_ids(rest, 3)
    else:
        assert [own.token_layers.tolist() for own in answer.repaired] == [[4 * backbone().layout.layers]] * 2


def test_a_request_runs_the_tower_once_and_images_are_found_by_their_own_digest(store):
    counting = counting_backbone()
    cache = RequestCache(counting, store, [kvp.Text("w40 w41 w42")])
    first = cache.splice([kvp.Text("w7"), image_of(1), image_of(2), kvp.Text("w9")])
    assert (first.encoder, first.images) == ("computed", ("computed", "computed"))
    store.flush()
    # Another text around the same images: encoder and KV are both there.
    second = cache.splice([kvp.Text("w8 w8"), image_of(1), image_of(2), kvp.Text("w9 w10")])
    assert (second.encoder, second.images) == ("store", ("store", "store"))
    assert counting.encodes == 1
    # One image alone is another request to the tower, and the same image to the KV cache.
    third = cache.splice([image_of(2), kvp.Text("w9")])
    assert (third.encoder, third.images) == ("computed", ("store",))
    # Recomputed whole, a request is what a prefill gives.
    whole = encoder_cached_reprefill(backbone(), second.splice, 1.0)
    prompt = backbone().prepare([kvp.Text("w8 w8"), image_of(1), image_of(2), kvp.Text("w9 w10")])
    expected = backbone().prefill(backbone().embed(**prompt)).logits
    np.testing.assert_allclose(np.asarray(whole.logits), np.asarray(expected), atol=1e-4, rtol=1e-4)
    assert vlcache(backbone(), second.splice, 0.5).logits is not None


@pytest.mark.parametrize("prompt", ["IMAGE#ONE w20 w21", "w7 IMAGE#ONE w20 w21"])
def test_a_tokenizers_own_first_token_stands_in_front_of_a_linked_prompt_once(store, prompt):
    other = beginning_backbone()
    server = PromptServer(other, library(store), repair="encoder_cached_reprefill", budget=1.0)
    server.upload("ONE", image_of(1))
    (repaired,) = (answer := server.answer(prompt, 1, stop=())).repaired
    items = [*([kvp.Text("w7")] if prompt.startswith("w7") else []), image_of(1), kvp.Text("w20 w21")]
    whole = other.prefill(other.embed(**other.prepare(items))).logits
    np.testing.assert_allclose(np.asarray(repaired.logits), np.asarray(whole), atol=1e-4, rtol=1e-4)
    assert answer.ids == (int(np.asarray(whole)[0, -1].argmax()),)


def test_images_are_found_behind_a_tokenizers_own_first_token(store):
    """It stands in front of the prompt once, whether a text or an image comes first."""
    other = beginning_backbone()
    cache = RequestCache(other, store, [kvp.Text("w40")])
    for items in (
        [image_of(1), kvp.Text("w9"), image_of(2), [7, 8], kvp.Text("w5")],
        [kvp.Text("w7 w8"), image_of(1), image_of(2), kvp.Text("w5")],
    ):
        ids = np.asarray(other.prepare(items)["input_ids"])[0]
        assert ids[0] == 59
        marked = {place for first, last in cache.splice(items).splice.parts for place in range(first, last)}
        assert set(np.flatnonzero(ids == other.config.image_token)) <= marked
        assert not marked & {place for place, id in enumerate(ids) if id in (59, 5, 7, 8, 9)}


def test_cached_images_were_prefilled_behind_the_substitute(store):
    substitute = [kvp.Text("w40 w41 w42")]
    cache = RequestCache(backbone(), store, substitute)
    found = cache.splice([kvp.Text("w7"), image_of(1), kvp.Text("w9")]).splice
    image = backbone().embed(**backbone().prepare([image_of(1)]))
    front = backbone().embed(**backbone().prepare(substitute))
    expected = behind_substitute(backbone(), front, image)
    (first, last), layout = found.parts[0], backbone().layout
    placed = kvp.to_engine(layout, expected, found.tokens.positions[:, first:last], 0)
    for name in layout.names:
        np.testing.assert_allclose(
            np.asarray(found.cache[name][:, :, first:last]), np.asarray(placed[name]), atol=1e-5, rtol=1e-5
        )
    # The server's canonicals behind a substitute are the same, by the same name in the store.
    server = PromptServer(backbone(), library(store), substitute=substitute, budget=RepairBudget(tokens=2))
    server.static.put("ONE", image_of(1))
    store.flush()
    assert [own.origin for own in server.answer("w7 IMAGE#ONE w9", 1, stop=()).linked] == ["store"]


def test_requests_without_images_or_without_a_question_are_refused(store, tmp_path, unchecked):
    cache = RequestCache(backbone(), store, [kvp.Text("w40")])
    for items in ([kvp.Text("w7")], [kvp.Text("w7"), image_of(1)]):
        with pytest.raises(InputError, match="at least one image, video or sound, and a text at the end"):
            cache.splice(items)
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file() and ".kv" in path.name]


def test_a_hybrid_model_is_refused_before_anything_is_kept(store: ChunkStore):
    """Its prompts are answered by no repair; what was uploaded would be of no use."""
    hybrid = copy.copy(backbone())
    hybrid.layout = LAYOUT
    with pytest.raises(LayoutError, match="repair: got a hybrid model"):
        PromptServer(hybrid, StaticLibrary(store, quota=1 << 26))

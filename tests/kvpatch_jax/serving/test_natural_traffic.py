"""Requests as agents send them: prompts that come again, grow, slide and change their order, with no client's help.

The pool's prefills say what they were computed behind, so a chunk's rows show which history they are of.
"""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false

import numpy as np
import pytest
from serving_sides import LAYOUT, served, sides_of, true_kv

import kvpatch_jax as kvp
from kvpatch_jax.cache import identity
from kvpatch_jax.core import EngineKV
from kvpatch_jax.plan import Certificate, CertifiedLoss, RankChoice
from kvpatch_jax.serving.vllm import PromptSegment
from kvpatch_jax.serving.vllm.messages import StepCommands
from kvpatch_jax.serving.vllm.prompt_history import PromptHistory
from kvpatch_jax.serving.vllm.survivors import Survivor, SurvivorKey, Survivors

LEAD, SIZE = (901, 902, 903, 904), 5
PAGES = [tuple(range(100 * page, 100 * page + SIZE)) for page in range(1, 9)]
QUESTION = (7, 8)
REMEMBER = {"policy": "approximate", "promise": "remember"}
BLIND = {"policy": "blind"}


@pytest.fixture
def sides(tmp_path):
    with sides_of(tmp_path) as made:
        yield made


def asked(sides, name, pages, computed=0, **options):
    """Sends a prompt of the lead, some pages and a question."""
    tokens, ends = [*LEAD], [len(LEAD)]
    for page in pages:
        tokens += PAGES[page]
        ends.append(len(tokens))
    found = served(sides, name, {"segments": ends, **options}, [*tokens, *QUESTION], tuple(range(3, 19)), computed)
    assert not found.failed
    told = sides.scheduler.finish(found.request)["kvpatch"]
    return found, told


def rows_of(pages, index, at):
    """What a prefill leaves of one page of a prompt, rotated to another place: [L, T, 128]."""
    tokens = [*LEAD, *(token for page in pages for token in PAGES[page])]
    begin = len(LEAD) + SIZE * index
    kv = {name: value[:, begin : begin + SIZE] for name, value in true_kv(tokens).items()}
    local = np.arange(SIZE, dtype=np.float32)
    free = kvp.to_phase_free(LAYOUT, EngineKV(kv), local, begin)
    turned = kvp.to_engine(LAYOUT, dict(free), local, at)
    return np.concatenate([np.asarray(turned[name])[:, :, 0] for name in "kv"], axis=-1)


def points(told):
    return [point for point, _ in told["served"]]


def page_rows(found, index):
    begin = len(LEAD) + SIZE * index
    return found.loaded[:, begin : begin + SIZE]


def alike(rows, expected):
    np.testing.assert_allclose(rows, expected, rtol=3e-4, atol=3e-4)


# ------------------------------------------------------------------------------------------------- exact prefixes


def test_a_prompt_that_comes_again_is_exact_in_all_its_chunks(sides):
    first, _ = asked(sides, "first", [0, 1, 2])
    assert (first.count, sides.worker.former.counts["prefills"]) == (0, 3)
    again, told = asked(sides, "again", [0, 1, 2])
    assert (again.count, told["exact"], told["kl"]) == (len(LEAD) + 3 * SIZE, True, 0.0)
    assert again.request.cache_salt is None, "it may share blocks with what the engine computes"
    assert points(told) == ["leading", "restored", "restored", "restored"]
    for index in range(3):
        alike(page_rows(again, index), rows_of([0, 1, 2], index, len(LEAD) + SIZE * index))
    assert not again.orders.saves, "all of it is stored"


def test_an_exact_prefix_outlives_the_engine_and_serves_another(tmp_path):
    with sides_of(tmp_path) as sides:
        asked(sides, "first", [0, 1])
    with sides_of(tmp_path) as one, sides_of(tmp_path) as other:
        for sides, new in ((one, 2), (other, 3)):
            again, told = asked(sides, "again", [0, 1, new])
            assert (again.count, told["exact"]) == (len(LEAD) + 2 * SIZE, True)


def test_exact_requests_are_served_nothing_behind_other_chunks(sides):
    asked(sides, "first", [0, 1, 2])
    other, told = asked(sides, "other", [1, 2])
    assert (other.count, points(told)) == (len(LEAD), ["leading"])
    assert told["why"] == "chunk 2 of 3 is not stored behind those in front of it"
    same, told = asked(sides, "prefix", [0, 1, 3])
    assert (same.count, told["exact"]) == (len(LEAD) + 2 * SIZE, True)


# ------------------------------------------------------------------------------------------- bases, other orders


def test_every_chunk_of_a_request_is_a_base_for_later_ones(sides):
    """Behind the same neighbour. The KV is that of the request that it came with."""
    asked(sides, "first", [0, 1, 2, 3])
    asked(sides, "lone", [1, 5])
    found, told = asked(sides, "second", [1, 2, 3], **BLIND)
    assert points(told) == ["leading", "restored", "near", "near"]
    assert (found.count, told["exact"]) == (len(LEAD) + 3 * SIZE, False)
    assert found.request.cache_salt.startswith("kvpatch-")
    alike(page_rows(found, 0), rows_of([1, 5], 0, len(LEAD)))
    for index, place in ((1, 2), (2, 3)):
        alike(page_rows(found, index), rows_of([0, 1, 2, 3], place, len(LEAD) + SIZE * index))
    assert not found.orders.saves or not found.orders.saves[0].prefills, "behind approximate chunks nothing is formed"


def test_a_chunk_behind_another_lead_is_no_base(sides):
    asked(sides, "first", [0, 1])
    tokens = [*PAGES[7], *PAGES[0], *PAGES[1], *QUESTION]
    found = served(sides, "other", {"segments": [5, 10, 15], **BLIND}, tokens, tuple(range(3, 19)))
    assert found.count == 0


def test_uncertified_bases_serve_no_approximate_request(sides):
    asked(sides, "first", [0, 1, 2])
    asked(sides, "lone", [1, 5])
    found, told = asked(sides, "second", [1, 2], policy="approximate")
    assert (found.count, points(told)) == (len(LEAD) + SIZE, ["leading", "restored"])
    assert "is not certified" in told["why"]


def certificate_of(rows, chunks=8, content="text"):
    made = [CertifiedLoss(*row[:3], row[3], 0.0, 0.0, 0.0, row[4], 1.0, 1.0, 1.0, None, 0.0, 0.1, 10) for row in rows]
    given = {"backbone": "tiny", "model": "m", "made": "2026-01-01", "level": 0.95, "calibration": 30, "held_out": 30}
    given |= {"chunks": chunks, "tokens": 99, "content": content, "asked": "a", "disjoint": True}
    given |= {"spans": (1, 99), "modalities": ("text",)}
    return Certificate(**given, rows=tuple(made), recommended=RankChoice(4, "r"))


def test_the_way_with_the_least_bound_serves_a_chunk(sides):
    """A mean or one of the prefills that it is of, as the certificate says."""
    for name, pages in (("first", [0, 1, 2]), ("second", [3, 1, 2]), ("lone", [1, 5])):
        asked(sides, name, pages)
    rows = [("near", 0, behind, "forget", 0.04) for behind in (0, 7)]
    rows += [("mean", 0, behind, "forget", 0.01) for behind in (0, 7)]
    sides.scheduler.certificate = certificate_of(rows)
    _, told = asked(sides, "one", [4, 1, 2], policy="approximate")
    assert points(told) == ["leading"], "the first page is new, and what comes behind cannot be placed without it"
    _, told = asked(sides, "two", [1, 2], policy="approximate", save=False)
    assert (points(told), told["kl"]) == (["leading", "restored", "mean"], 0.01)
    sides.scheduler.certificate = certificate_of([(*row[:4], 0.05 - row[4]) for row in rows])
    _, told = asked(sides, "three", [1, 2], policy="approximate", save=False)
    assert points(told) == ["leading", "restored", "near"]
    sides.scheduler.certificate = certificate_of([(*row[:4], 0.04) for row in rows])
    _, told = asked(sides, "four", [1, 2], policy="approximate", kl=0.03, save=False)
    assert points(told) == ["leading", "restored"], "the bounds are too large"


def test_a_damaged_prefill_gives_way_to_the_next_best(tmp_path):
    with sides_of(tmp_path) as sides:
        asked(sides, "first", [0, 1, 2])
        store = sides.scheduler.stores.of("default")
        prefills = sides.scheduler.stores.prefills("default", np.dtype("float32"))
        found, _ = asked(sides, "again", [0, 1, 2])
        step = found.orders.loads[0].payloads[2].step
        name = store.names.canonical("tiny", step.segment.id, lead=prefills.lead(step.identity))
        path = tmp_path / "store" / "data" / store.objects.index.row("SELECT file FROM objects WHERE name = ?", name)[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with sides_of(tmp_path) as sides:
        sides.scheduler.stores.shared.memory.clear()
        _, told = asked(sides, "after", [0, 1, 2])
        assert points(told) == ["leading", "restored"]
        _, told = asked(sides, "then", [0, 1, 2])
        assert points(told) == ["leading", "restored", "restored", "restored"], "it was stored again"


# --------------------------------------------------------------------------------------------------- survivors


def test_a_sliding_window_prefills_new_chunks_alone(sides):
    """It remembers: each page keeps the KV that it had when it came, turned to where it stands now."""
    asked(sides, "turn 0", [0, 1, 2], **REMEMBER)
    histories = {page: ([0, 1, 2], page) for page in range(3)}
    for turn in range(1, 5):
        window = [turn, turn + 1, turn + 2]
        found, told = asked(sides, f"turn {turn}", window, **REMEMBER)
        assert found.count == len(LEAD) + 2 * SIZE, "all but the new page"
        assert points(told) == ["leading", "survivor", "survivor"]
        assert (told["promise"], told["exact"], told["kl"]) == ("remember", False, 0.0)
        for index, page in enumerate(window[:2]):
            alike(page_rows(found, index), rows_of(*histories[page], len(LEAD) + SIZE * index))
        histories[turn + 2] = (window, 2)
    assert sides.worker.former.counts["survivors"] == 3 + 4
    assert len(sides.scheduler.survivors) == 7


def test_a_window_that_lost_a_chunk_in_its_middle_turns_the_rest(sides):
    asked(sides, "first", [0, 1, 2, 3], **REMEMBER)
    found, told = asked(sides, "second", [0, 2, 3, 4], **REMEMBER)
    assert points(told) == ["leading", "restored", "survivor", "survivor"], "nothing has left in front of the first"
    alike(page_rows(found, 1), rows_of([0, 1, 2, 3], 2, len(LEAD) + SIZE))


def test_what_a_survivor_has_not_seen_is_not_remembered(sides):
    """Another order, or a page that was put in between: those behind it are no survivors."""
    asked(sides, "first", [0, 1, 2], **REMEMBER)
    _, told = asked(sides, "other order", [1, 0, 2], **REMEMBER)
    assert points(told) == ["leading", "survivor"]
    _, told = asked(sides, "inserted", [0, 5, 1, 2], **REMEMBER)
    assert points(told) == ["leading", "survivor"]


def test_a_page_that_is_there_twice_survives_as_each_of_both(sides):
    """The later one has seen the earlier one, and does not stand in for it."""
    asked(sides, "first", [0, 1, 0, 2], **REMEMBER)
    found, told = asked(sides, "second", [1, 0, 2], **REMEMBER)
    assert points(told) == ["leading", "survivor"], "it is unknown whether the first or the second of both has left"
    asked(sides, "third", [5, 3, 4, 3], **REMEMBER)
    found, told = asked(sides, "fourth", [3, 4, 3], **REMEMBER)
    assert points(told) == ["leading", "survivor", "survivor", "survivor"]
    for index in range(3):
        alike(page_rows(found, index), rows_of([5, 3, 4, 3], 1 + index, len(LEAD) + SIZE * index))


@pytest.mark.parametrize("other", [{"agent": "another"}, {"tenant": "another"}, {"promise": "forget"}])
def test_survivors_serve_no_one_else(sides, other):
    """Nor a request that is to be compared with its own prefill, unless a certificate bounds them."""
    asked(sides, "first", [0, 1, 2], agent="one", **REMEMBER)
    _, told = asked(sides, "second", [1, 2], **{**REMEMBER, "agent": "one", **other})
    assert points(told)[:2] in ([], ["leading"])


def test_exact_requests_leave_and_get_no_survivors(sides):
    asked(sides, "first", [0, 1, 2])
    assert len(sides.scheduler.survivors) == 0
    _, told = asked(sides, "second", [1, 2], **REMEMBER)
    assert points(told) == ["leading"]
    _, told = asked(sides, "third", [2, 3])
    assert points(told) == ["leading"]


def test_survivors_of_forgetting_requests_are_bounded_by_the_certificate(sides):
    certain = lambda kl: certificate_of([("survivor", 8, behind, "forget", kl) for behind in (0, 7)])
    sides.scheduler.certificate = certain(0.02)
    asked(sides, "first", [0, 1, 2], policy="approximate")
    _, told = asked(sides, "second", [1, 2, 3], policy="approximate")
    assert (points(told), told["kl"]) == (["leading", "survivor", "survivor"], 0.02)
    sides.scheduler.certificate = certain(0.06)
    _, told = asked(sides, "third", [2, 3, 4], policy="approximate")
    assert points(told) == ["leading"], "beyond the operator's limit"


def test_a_chunk_prefilled_behind_approximate_ones_keeps_their_bound(sides):
    """A window that remembers promises its survivors, but not what was computed behind what nobody promised."""
    for name, pages in (("base", [0, 1, 2]), ("lone", [1, 5])):
        asked(sides, name, pages)
    rows = [("near", 0, behind, promise, 0.03) for behind in (0, 7) for promise in ("forget", "remember")]
    sides.scheduler.certificate = certificate_of(rows)
    _, told = asked(sides, "first", [1, 2, 3], **REMEMBER)
    assert (points(told), told["kl"]) == (["leading", "restored", "near"], 0.03)
    _, told = asked(sides, "second", [1, 2, 3, 4], **REMEMBER)
    assert (points(told), told["kl"]) == (["leading", "restored", "near", "survivor"], 0.03)
    _, told = asked(sides, "third", [3, 4], **REMEMBER)
    assert (points(told), told["kl"]) == (["leading", "survivor", "survivor"], 0.03), "what they inherited stays"


def test_survivors_stay_within_their_bytes(tmp_path):
    one = 2 * SIZE * LAYOUT.bytes_per_token("float32") // 2
    with sides_of(tmp_path, survivor_bytes=2 * one) as sides:
        asked(sides, "first", [0, 1, 2, 3], **REMEMBER)
        assert (len(sides.scheduler.survivors), sides.scheduler.survivors.nbytes) == (2, 2 * one)
    with sides_of(tmp_path / "none", survivor_bytes=0) as sides:
        found, _ = asked(sides, "first", [0, 1], **REMEMBER)
        assert not found.orders.saves[0].survivors


def test_survivors_hold_one_version_per_name():
    kept = Survivors(100)
    chunk = lambda nbytes: type("Held", (), {"nbytes": nbytes})()
    key = lambda id, tenant="t": SurvivorKey(tenant, "", id)
    assert kept.put(key("a"), Survivor(chunk(40), identity("a"), ()))
    assert kept.put(key("a"), Survivor(chunk(60), identity("a"), ()))
    assert (len(kept), kept.nbytes) == (1, 60)
    assert not kept.put(key("b"), Survivor(chunk(101), identity("b"), ()))
    assert kept.put(key("b", "u"), Survivor(chunk(30), identity("b"), ()))
    assert kept.get(key("a")) is not None
    kept.put(key("c"), Survivor(chunk(30), identity("c"), ()))
    assert (kept.get(key("b", "u")), kept.nbytes) == (None, 90), "the least recently used one went"
    assert (kept.clear("u"), kept.clear("t"), kept.nbytes) == (0, 2, 0)


# --------------------------------------------------------------------------- beside the engine's own prefix cache


def test_a_request_that_the_engine_has_keeps_its_own_salt(sides):
    """A window that only grows: the engine's blocks are exact, and no other salt hides them."""
    for name, pages in (("first", [0, 1, 2, 3]), ("lone", [1, 5])):
        asked(sides, name, pages, **BLIND)
    found, told = asked(sides, "second", [1, 2], computed=16, **BLIND)
    assert found.request.cache_salt is None
    assert told["why"] == "the engine has as much of it in its own cache"
    assert sides.scheduler.counts["left_to_the_engine"] == 1
    assert (points(told), told["exact"]) == (["leading"], True)
    found, told = asked(sides, "third", [1, 2, 3], computed=4, **BLIND)
    assert found.request.cache_salt is not None
    assert len(points(told)) == 4


# -------------------------------------------------------------------------------------------------- admission


def test_patches_are_formed_when_their_antecedent_comes_again(tmp_path):
    """Of chunks whose canonical is stored; a history that came once costs nothing but the first prefill."""
    with sides_of(tmp_path, patch_after=2) as sides:
        served(sides, "alone", {"segments": [SIZE]}, [*PAGES[1], *QUESTION], tuple(range(3, 19)))
        former = sides.worker.former
        asked(sides, "base", [2, 1])
        assert former.counts["prefills"] == 2
        for times in (1, 2, 3):
            asked(sides, f"time {times}", [3, 2, 1])
            assert former.counts["patches"] == (times >= 2), times


def test_many_histories_of_a_chunk_are_not_all_kept(tmp_path):
    with sides_of(tmp_path, patch_after=2) as sides:
        former = sides.worker.former
        neighbours = [[1000 + number] * SIZE for number in range(10)]
        for number, near in enumerate(neighbours):
            tokens = [*LEAD, *near, *PAGES[0], *QUESTION]
            served(sides, f"{number}", {"segments": [4, 9, 14]}, tokens, tuple(range(3, 19)))
        assert former.counts["prefills"] == 10 + 8, "each neighbour, and the page behind eight of them"
        tokens = [*LEAD, *neighbours[9], *PAGES[0], *QUESTION]
        served(sides, "again", {"segments": [4, 9, 14]}, tokens, tuple(range(3, 19)))
        assert former.counts["prefills"] == 10 + 9


def test_nothing_is_kept_of_requests_that_ask_for_that(sides):
    found, _ = asked(sides, "first", [0, 1], save=False, **REMEMBER)
    assert found.orders.saves == ()
    assert found.orders == StepCommands()


def test_one_object_looks_stored_prefills_up_until_the_name_changes(sides):
    """It remembers what a remote store lists; under another name, or for another pool, that is another thing."""
    stores = sides.scheduler.stores
    own = stores.prefills("default", "float32")
    assert stores.prefills("default", np.float32) is own
    assert stores.prefills("default", "bfloat16") is not own
    assert stores.prefills("other", "float32") is not own
    stores.shared.reset()
    assert stores.prefills("default", "float32").backbone != own.backbone


def test_the_lead_are_the_texts_before_the_first_image():
    text, image = PromptSegment("t", 0, 4), PromptSegment("i", 4, 9, "image")
    assert PromptHistory([text, text, image, text]).lead == 2
    assert PromptHistory([image, text]).lead == 1
    assert PromptHistory([text, text, text]).lead == 1
    assert PromptHistory([]).lead == 1

"""The connector in vLLM with tpu-inference on a CPU: run by `tests/serving/run`, in an environment of its own.

Every scenario is a process with an engine of its own (`engine_program.py`), so that chunks go from one to the other.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import serving_guide
import tiny_model

HERE = Path(__file__).parent
pytestmark = pytest.mark.engine

MATCHED, LEADING = 88, 48
"""Tokens of both chunks, and of the first."""
CONTEXTS = {"trained": 256, "bfloat16": 64, "divided": 8, "reordered": 32, "certified": 12, "pretrained": 8}
CONTEXTS |= {"documents": 60}
"""Contexts of the trained model's task, texts, turns or requests: of `NAME_program.py`, or `trained_program.py`."""

LOOPS = {"sliding": 200, "reopened": 200, "appended": 200}
"""Turns of the loops of `loops_program.py`."""

LEVEL = 0.95
"""Share of the answers that the bounds of the loops' certificates are for."""


@pytest.fixture(scope="module")
def work(tmp_path_factory, request):
    given = request.config.getoption("--work")
    return Path(given).absolute() if given else tmp_path_factory.mktemp("engine")


def start(work, scenario, kind, *, dies=False):
    """Runs a scenario's process to its end, whatever that is to be."""
    if scenario in ("bfloat16", "divided"):
        command = ["trained_program.py", work, CONTEXTS[scenario], scenario]
    elif scenario in LOOPS:
        command = ["loops_program.py", work, LOOPS[scenario], scenario]
    elif scenario in CONTEXTS:
        command = [f"{scenario}_program.py", work, CONTEXTS[scenario]]
    else:
        program = "endurance_program.py" if scenario in ("many", "killed", "revived") else "engine_program.py"
        command = [program, scenario, work, kind]
    command = [sys.executable, *map(str, command)]
    made = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=3600, check=False)
    if made.returncode != (-signal.SIGKILL if dies else 0):
        pytest.fail(f"{scenario}: {made.returncode}, {made.stdout[-2000:]}\n{made.stderr[-4000:]}")


@pytest.fixture(scope="module")
def run(work, request):
    """Runs a scenario in a process of its own; what it found is kept, and written once all have run."""
    done = {}

    def run(scenario, kind="128"):
        own = scenario in (*CONTEXTS, *LOOPS)
        key = scenario if own else f"{scenario}, {kind}"
        if key not in done:
            found = work / f"{scenario}-{(CONTEXTS | LOOPS).get(scenario, kind)}.json"
            if not found.exists():
                start(work, scenario, kind)
            done[key] = json.loads(found.read_text())
        return done[key]

    yield run
    if request.config.getoption("--write-results"):
        results = json.loads(serving_guide.RESULTS.read_text()) | done  # of what has not run now, as it was
        serving_guide.RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        serving_guide.write()


@pytest.fixture(scope="module", params=tiny_model.KINDS)
def formed(run, request):
    return run("forms", request.param)


@pytest.fixture(scope="module")
def served(run):
    run("forms")
    return run("serves")


def test_the_engine_agrees_with_itself(formed):
    assert formed["again"]["tokens_equal_in_front"] == formed["again"]["of"]


def test_chunks_and_patches_are_formed_from_traffic(formed):
    assert formed["formed"] == {"canonicals": 5, "patches": 1}


@pytest.mark.parametrize("way", ["exact", "leading"])
def test_exact_kv_from_the_store_gives_equal_tokens(formed, way):
    found = formed[way]
    assert found["cached"] == found["told"]["matched"] == (MATCHED if way == "exact" else LEADING)
    assert found["told"]["exact"]
    assert found["tokens_equal_in_front"] == found["of"]
    narrow = tiny_model.KINDS[formed["kind"]].dtype == "bfloat16"
    assert found["largest_difference_of_log_probabilities"] <= (0 if narrow else 1e-3), "in bfloat16 every bit"


def test_a_chunk_that_moved_is_turned_as_the_engine_turns(formed):
    """In the lowest layer KV depends on a token and its position alone. Where it is bfloat16 three roundings differ:

    of both numbers of a pair where the chunk was formed, and of one where it stands, here and in the prefill.
    """
    bar = (2**0.5 + 2) * 2**-9 if tiny_model.KINDS[formed["kind"]].dtype == "bfloat16" else 1e-5
    assert formed["first_layer"]["v"] == 0
    assert formed["first_layer"]["k"] < bar


def test_a_patch_brings_the_answer_back(formed):
    """Random weights: the order of blind reuse and patches is shown, and how far each is off; not a task's accuracy."""
    stored, bare = formed["stored"], formed["bare"]
    assert stored["told"]["served"] == [["leading", 0], ["stored", 16]]
    assert bare["told"]["served"] == [["leading", 0], ["bare", 0]]
    assert stored["cached"] == bare["cached"] == MATCHED
    apart = "largest_difference_of_log_probabilities"
    assert stored[apart] < bare[apart]


def test_without_a_salt_a_plain_request_is_contaminated(formed):
    found = formed["plain_after_bare_without_salt"]
    assert found["cached"] >= LEADING
    assert found["largest_difference_of_log_probabilities"] > 1e-2


def test_with_the_salt_nothing_is_contaminated(formed):
    found = formed["plain_after_bare"]
    assert found["cached"] == 0
    assert found["tokens_equal_in_front"] == found["of"]
    assert found["largest_difference_of_log_probabilities"] < 1e-3
    again = formed["bare_again"]
    assert again["cached"] > MATCHED, "requests of one plan share blocks, the question's too"


def test_while_chunks_are_read_another_request_is_answered(formed):
    """Under async scheduling, both asked at once, the one of chunks first: two chunks take a second to be read."""
    found = formed["ahead"]
    assert found["seconds"]["plain"] < found["seconds_of_a_read"]
    assert found["seconds"]["chunks"] > 2 * found["seconds_of_a_read"]
    assert found["chunks"]["told"]["served"] == formed["stored"]["told"]["served"]
    assert found["chunks"]["tokens_equal_in_front"] == formed["stored"]["tokens_equal_in_front"]
    assert (found["plain"]["cached"], found["plain"]["tokens_equal_in_front"]) == (0, found["plain"]["of"])
    assert found["asked_again"] < 400, "an idle engine waits for the store, and does not ask all the time"
    behind = found["behind_one_that_was_abandoned"]
    assert behind["tokens_equal_in_front"] == behind["of"]
    assert found["tracked"] == 0


def test_what_one_process_formed_another_serves(served, run):
    formed = run("forms")
    assert served["leading"]["cached"] == LEADING
    assert served["leading"]["tokens_equal_in_front"] == served["leading"]["of"]
    assert served["stored"]["told"]["served"] == [["leading", 0], ["stored", 16]]
    apart = "largest_difference_of_log_probabilities"
    assert abs(served["stored"][apart] - formed["stored"][apart]) < 1e-3


def test_heads_lie_on_the_devices_that_share_them(formed):
    found, devices = formed["pages"], tiny_model.KINDS[formed["kind"]].devices
    assert found["devices"] == devices
    assert np.divide(found["shape"], found["on_each"]).tolist() == [1, 1, devices, 1, 1]


def test_what_one_device_formed_two_serve(run):
    """They have the model's only KV head both; chunks have it once."""
    formed, found = run("forms"), run("wider")
    assert (formed["pages"]["devices"], found["pages"]["devices"]) == (1, 2)
    apart = "largest_difference_of_log_probabilities"
    for way in ("leading", "plain_after_bare"):
        assert found[way]["tokens_equal_in_front"] == found[way]["of"]
        assert found[way][apart] < 1e-3
    for way in ("leading", "stored", "bare"):
        assert found[way]["told"]["served"] == formed[way]["told"]["served"]
        assert abs(found[way][apart] - formed[way][apart]) < 1e-3


def test_a_damaged_object_becomes_a_recompute(served):
    assert served["damaged"]["cached"] == 0
    assert served["damaged"]["told"]["why"] == "chunk 1 of 1 is not stored"
    for answer in (served["damaged"], served["plain_after_damaged"]):
        assert answer["tokens_equal_in_front"] == answer["of"]
        assert answer["largest_difference_of_log_probabilities"] < 1e-3


def test_what_could_not_be_spliced_is_recomputed(served):
    """Without async scheduling; the connector refuses to recompute with it."""
    assert served["not_loaded"]["told"]["failed"]
    assert served["counts"]["failed"] == 1
    for answer in (served["not_loaded"], served["plain_after_not_loaded"]):
        assert answer["tokens_equal_in_front"] == answer["of"]
        assert answer["largest_difference_of_log_probabilities"] < 1e-3


def test_what_cannot_be_planned_is_served_plainly(served):
    assert served["refused"]["told"] == {}
    assert served["refused"]["tokens_equal_in_front"] == served["refused"]["of"]


@pytest.mark.parametrize(("way", "kind"), [("mixed", "128"), ("mended", "128")])
def test_eight_at_once_answer_as_one_at_a_time(run, way, kind):
    """Without async scheduling; and with it, once the engine is mended (`cpu_rig.mend_resumed_requests`)."""
    run("forms", kind)
    found = run(way, kind)
    assert found["preemptions"], "the pool is to be too small"
    for answer in found["together"]:
        assert answer["tokens_equal_in_front"] == answer["of"]
        assert answer["largest_difference_of_log_probabilities"] < 1e-3
    first, last = found["free_blocks"]
    assert first == last


def test_the_engine_alone_loses_the_last_token_of_a_preempted_request(run):
    """What tpu-inference 0.32 does without us. Where this fails it was mended: the guide and the warning can say so."""
    found = run("preempted")
    parted = [answer for answer in found["together"] if answer["tokens_equal_in_front"] < answer["of"]]
    assert 1 <= len(parted) <= found["preemptions"]
    assert all(answer["equal_to_the_answer_behind_a_0"] for answer in parted)
    assert found["preemptions_mended"]
    assert set(found["mended"]) == {found["together"][0]["of"]}


def test_500_mixed_requests_leave_nothing_behind_and_contaminate_nobody(run):
    run("forms")
    found = run("many")
    assert sum(found["requests"].values()) == 500
    assert found["equal_to_alone"] == found["requests"]
    assert found["plain_is_not_bare"], "else contamination would not show"
    for name, left in found["left_to_the_engine"].items():
        assert 0 < left < found["requests"][name], "some in each way"
    assert found["damaged_matched"] == 0
    assert found["preemptions"]
    first, last = found["free_blocks"]
    assert first == last
    assert found["tracked"] == 0


def test_an_engine_killed_while_it_saves_leaves_nothing_wrong(run, work):
    """The chunk whose save was cut is not there; the other one is, and what is formed again is served."""
    if not (work / "revived-128.json").exists():
        start(work, "killed", "128", dies=True)
    found = run("revived")
    assert found["left"]["told"]["served"] == [["leading", 0]]
    assert found["left"]["tokens_equal_in_front"] == found["left"]["of"]
    assert found["formed"] == {"canonicals": 1, "patches": 1}
    assert found["again"]["told"]["served"] == [["leading", 0], ["stored", 16]]


@pytest.fixture(scope="module")
def ways(run):
    """How every way of serving the trained model did."""
    return run("trained")["ways"]


def test_questions_are_enough_for_intervals(ways):
    for way in ways.values():
        assert way["right"]["chain"]["n"] >= 256
        assert way["right"]["aggregate"]["n"] >= 256


def test_images_under_mrope_are_served_exactly_as_the_engine_computes_them(ways):
    """The first chunk from the store, the rest the engine's: the same answers, with fewer tokens prefilled."""
    for way in ("prefix cache", "leading"):
        assert ways[way]["first_tokens_equal_to_the_engine_alone"] == 1.0
        assert ways[way]["right"] == ways["re-prefill"]["right"]
    assert ways["leading"]["served"] == [["leading", 0]]
    first = "prefilled_tokens_of_the_first_question"
    assert ways["leading"][first] < ways["prefix cache"][first]


@pytest.mark.parametrize("scenario", ["trained", "bfloat16"])
def test_patches_bring_accuracy_back_in_the_engine(run, scenario):
    """Blind reuse is measurably worse than re-prefill where several images are needed, and patches are not."""
    ways = run(scenario)["ways"]
    for kind in ("chain", "aggregate"):
        right = {way: found["right"][kind] for way, found in ways.items()}
        assert right["blind"]["high"] < right["re-prefill"]["low"]
        for rank in ("rank 8", "rank 16"):
            assert right["blind"]["high"] < right[rank]["low"]
    for rank in (8, 16):
        assert ways[f"rank {rank}"]["served"] == [["leading", 0]] + [["stored", rank]] * 3
        assert ways[f"rank {rank}"]["prefilled_tokens_of_the_first_question"] == 2


def test_in_bfloat16_a_leading_image_costs_no_more_than_the_engines_own_rounding(run):
    """Computing other numbers of images or tokens at once rounds otherwise; by a step of a logit between 4 and 8."""
    ways = run("bfloat16")["ways"]
    of = lambda way: ways[way]["difference_from_the_prefix_cache"]
    assert of("leading")["median"] == of("re-prefill")["median"] == 0
    assert max(of("leading")["largest"], of("re-prefill")["largest"]) <= 2**-5
    assert ways["leading"]["first_tokens_equal_to_the_engine_alone"] == 1
    assert of("blind")["median"] > of("rank 8")["median"] > of("rank 16")["median"] > 0


def test_the_engine_answers_as_our_own_executor_does(ways):
    """Log-probabilities of the engine's twenty likeliest tokens, in every way."""
    for way in ways.values():
        assert way["difference_from_our_executor"]["largest"] < 1e-3


def test_images_over_two_devices_are_served_as_on_one(run):
    """A KV head of the trained model on each."""
    ways = run("divided")["ways"]
    for way, found in ways.items():
        assert found["difference_from_our_executor"]["largest"] < 1e-3, way
    equal = {way: found["first_tokens_equal_to_the_engine_alone"] for way, found in ways.items()}
    assert equal["leading"] == equal["prefix cache"] == 1.0
    assert equal["blind"] < equal["rank 8"]
    assert equal["blind"] < equal["rank 16"]
    assert ways["rank 16"]["served"] == [["leading", 0]] + [["stored", 16]] * 3
    assert ways["rank 16"]["prefilled_tokens_of_the_first_question"] == 2


@pytest.fixture(scope="module")
def orders(run):
    """How every way did behind images as before and in another order."""
    return run("reordered")["orders"]


def test_in_another_order_chunks_are_served_where_the_prefix_cache_has_nothing(orders):
    first = "prefilled_tokens_of_the_first_question"
    before, after = orders["as before"], orders["reordered"]
    assert before["prefix cache"][first] < after["prefix cache"][first] == after["re-prefill"][first]
    assert after["rank 16"]["served"] == [["leading", 0]] + [["stored", 16]] * 3
    assert after["rank 16"][first] == 2


def test_in_another_order_patches_answer_as_a_prefill_does(orders):
    """Override questions have another answer in another order: patches are those of this order."""
    for kind in ("chain", "override"):
        right = {way: found["right"][kind] for way, found in orders["reordered"].items()}
        assert right["rank 16"]["high"] >= right["re-prefill"]["low"]
        assert right["leading"] == right["prefix cache"] == right["re-prefill"]


def test_the_certificate_decides_what_the_engine_serves(run):
    """Bare chunks never, for .05 nats are the operator's most; rank 8 where .0131 nats may be lost, rank 16 .00176."""
    found = run("certified")
    leading = [["leading", 0]]
    whole = {rank: leading + [["stored", rank]] * 3 for rank in (8, 16)}
    expected = {
        **{f"blind {bound}": leading for bound in ("0.001", "0.01", "10")},
        **{"rank8 0.001": leading, "rank8 0.01": leading, "rank8 10": whole[8]},
        **{"rank16 0.001": leading, "rank16 0.01": whole[16], "rank16 10": whole[16]},
    }
    for name, served in expected.items():
        own = found["bounds"][name]
        assert own["served"] == served
        assert own["promised"] <= found["most_kl"]
        assert own["within"] >= 0.9  # bounds are for nineteen answers in twenty
        assert ("not certified" in own["why"]) == (served == leading)


def test_released_weights_are_served_exactly_and_patches_come_nearer_with_their_rank(run):
    """SmolLM2's, in text: a leading chunk is exact; of the others the difference falls from blind reuse to rank 32."""
    found = run("pretrained")
    ways, texts = found["ways"], len(found["texts"])
    for way in ("prefix cache", "leading"):
        assert ways[way]["answers_equal"] == texts
        assert ways[way]["largest_difference"]["largest"] < 1e-3
    assert ways["leading"]["served"] == [["leading", 0]]
    assert ways["rank 32"]["served"] == [["leading", 0], ["stored", 32]]
    apart = [ways[way]["largest_difference"]["median"] for way in ("blind", "rank 8", "rank 16", "rank 32")]
    assert apart == sorted(apart, reverse=True)
    assert ways["rank 32"]["computed_tokens"] < ways["leading"]["computed_tokens"]


def test_documents_slide_at_a_fraction_of_the_prefix_cache(run):
    """SmolLM2's weights behind a lead: survivors lose .03 nats on average, and the rest is exact."""
    ways = run("documents")["ways"]
    alone = ways["prefix cache"]["prefilled_tokens"]
    assert ways["exact"]["largest_kl"] < 1e-3
    for way in ("remember", "forget"):
        assert ways[way]["prefilled_tokens"] <= 0.3 * alone
        assert ways[way]["points"]["survivor"] > 0
    assert ways["forget"]["kl"]["value"] <= 0.03


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_pay_as_they_come_and_within_their_bounds(run, loop):
    """Nothing is formed by hand; what an agent's loop prefills, beside the engine's own prefix cache."""
    ways = run(loop)["ways"]
    alone = ways["prefix cache"]["prefilled_tokens"]
    for way in ("exact", "forget"):
        own = ways[way]
        assert own["prefilled_tokens"] <= alone
        assert own["bounded"] == LOOPS[loop]
        assert own["right"]["value"] >= ways["re-prefill"]["right"]["value"] - 0.02
    assert ways["exact"]["within_their_bounds"] == LOOPS[loop]
    assert ways["forget"]["within_their_bounds"] >= LEVEL * LOOPS[loop], "the level that the bounds are of"
    assert ways["exact"]["largest_kl"] < 1e-5
    if loop == "sliding":
        assert ways["forget"]["prefilled_tokens"] <= 0.3 * alone
        assert ways["remember"]["prefilled_tokens"] <= 0.3 * alone
    if loop == "reopened":
        assert ways["forget"]["prefilled_tokens"] <= 0.35 * alone

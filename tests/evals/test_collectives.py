"""Reading what devices exchange from the text of a compiled program."""

import jax
import jax.numpy as jnp
import pytest

from evals.bench.collectives import exchanged_bytes, read_collectives
from kvpatch_jax.errors import InputError

HEADER = "HloModule jit_f, is_scheduled=true, num_partitions=4"


def module(entry: str, *others: str) -> str:
    """A module of these computations; `entry` is the body of the last."""
    return "\n\n".join([HEADER, *others, f"ENTRY %main.1 (x: f32[8]) -> f32[8] {{\n{entry}\n}}"]) + "\n"


@pytest.mark.parametrize(
    ("line", "sent"),
    [
        # 64 B of a result of which a device has a quarter and sends it three times.
        ("  %a = f32[16]{0} all-gather(%x), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}", 48),
        ("  %a = f32[16]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add", 96),
        ("  %a = f32[16]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add", 64),
        ("  %a = (f32[16]{0}, bf16[8]{0}) all-reduce(%x, %y), replica_groups={}, to_apply=%add", 120),
        ("  %a = f32[4]{0} reduce-scatter(%x), replica_groups=mesh['chunks'=4] {'chunks'}, to_apply=%add", 48),
        ("  %a = f32[4]{0} reduce-scatter(%x), replica_groups=mesh['a'=2,'b'=2] {'b'}, to_apply=%add", 16),
        ("  %a = f32[16]{0} all-to-all(%x), replica_groups=[1,4]<=[4], dimensions={0}", 48),
        ("  ROOT %a = f32[16]{0} collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}", 64),
        ("  %a = s8[16]{0} collective-permute(%x), source_target_pairs={{3,1}}", 4),
        # What is sent to itself does not travel.
        ("  %a = pred[16]{0} collective-permute(%x), source_target_pairs={{0,0},{1,0}}", 4),
        # Started apart: the operand stands before the result; on TPUs a layout has parentheses of its own.
        ("  %a = (f32[4]{0:T(128)}, f32[16]{0:T(128)}) all-gather-start(%x), replica_groups=[1,4]<=[4]", 48),
        ("  %a = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1}}", 8),
        ("  %a = f32[16]{0} add(%x, %y)", 0),
    ],
)
def test_a_collective_sends_what_the_usual_algorithm_sends(line, sent):
    assert exchanged_bytes(module(line)) == sent


LOOP = "  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body"
BODY = """%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = f32[8]{0} collective-permute(%g), source_target_pairs={{0,1},{1,0}}
  %f = f32[8]{0} fusion(%s), kind=kLoop, calls=%fused
}"""
TRIPS = ', backend_config={"known_trip_count":{"n":"6"}}'


def test_a_collective_in_loops_counts_as_often_as_they_run():
    outer = BODY.replace("%body", "%outer").replace("  %f", f"{LOOP}{TRIPS}\n  %f")
    nested = LOOP.replace("body=%body", "body=%outer") + ', backend_config={"known_trip_count": {"n": "3"}}'
    assert exchanged_bytes(module(LOOP + TRIPS, BODY)) == 6 * 16
    assert exchanged_bytes(module(nested, BODY, outer)) == 3 * (1 + 6) * 16
    assert {each.runs for each in read_collectives(module(nested, BODY, outer))} == {3, 18}


CONDITION = """%cond (p: (s32[], f32[8])) -> pred[] {
  %bound = s32[]{:T(128)} constant(5)
  %count = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%count, %bound), direction=LT
}"""


def test_a_loop_whose_length_the_compiler_does_not_say_is_counted_by_its_condition():
    assert exchanged_bytes(module(LOOP, BODY, CONDITION)) == 5 * 16
    with pytest.raises(InputError, match="loop of unknown length"):
        exchanged_bytes(module(LOOP, BODY, CONDITION.replace("direction=LT", "direction=NE")))
    with pytest.raises(InputError, match="loop of unknown length"):
        exchanged_bytes(module(LOOP, BODY, CONDITION.replace("constant(5)", "get-tuple-element(%p), index=2")))


def test_of_a_branch_the_side_that_exchanges_most_counts():
    permute = "collective-permute(%p), source_target_pairs={{{{0,1}}}}"
    side = f"%side{{0}} (p: f32[8]) -> f32[8] {{{{\n  %s = f32[{{1}}]{{{{0}}}} {permute}\n}}}}"
    branch = "  %c = f32[8] conditional(%i, %a, %b), branch_computations={%side1, %side2}"
    text = module(branch, side.format(1, 8), side.format(2, 40))
    assert exchanged_bytes(text) == 40
    assert len(read_collectives(text)) == 1


def test_a_loop_of_unknown_length_is_refused_only_where_devices_exchange():
    with pytest.raises(InputError, match="got collective-permute in a loop of unknown length; expected known_trip"):
        exchanged_bytes(module(LOOP, BODY))
    quiet = BODY.replace("collective-permute", "negate")
    assert exchanged_bytes(module(LOOP, quiet)) == 0


def test_text_without_an_entry_is_refused():
    with pytest.raises(InputError, match="expected the text of an HLO module with an ENTRY"):
        read_collectives("module @jit_f {}")


def test_a_program_of_one_device_exchanges_nothing():
    text = jax.jit(lambda x: jax.lax.scan(lambda c, y: (c + y, c), 0.0, x)).lower(jnp.ones(5)).compile().as_text()
    assert read_collectives(text or "") == []

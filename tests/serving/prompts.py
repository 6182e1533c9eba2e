"""Prompts as agents send them: a lead, pages and a question. A page's rows show what it was prefilled behind."""
# pyright: reportArgumentType=false, reportCallIssue=false

import numpy as np
from serving_sides import LAYOUT, report_of, served, true_kv

import kvpatch_jax as kvp
from kvpatch_jax.core import EngineKV
from tests.plan.plan_cases import certificate

LEAD, SIZE = (901, 902, 903, 904), 5
PAGES = [tuple(range(100 * page, 100 * page + SIZE)) for page in range(1, 9)]
QUESTION = (7, 8)
REMEMBER = {"reuse": "certified", "promise": "remember"}
CERTIFIED = {"reuse": "certified"}
PATCHED = {"reuse": "patched"}


def asked(sides, name, pages, computed=0, salt=None, **options):
    """Sends a prompt of the lead, some pages and a question; returns the answer and its report."""
    tokens, ends = [*LEAD], [len(LEAD)]
    for page in pages:
        tokens += PAGES[page]
        ends.append(len(tokens))
    blocks = tuple(range(3, 19))
    answer = served(sides, name, {"segments": ends, **options}, [*tokens, *QUESTION], blocks, computed, salt=salt)
    assert not answer.failed
    return answer, report_of(sides, answer)


def rows_of(pages, index, at):
    """Returns what a prefill leaves of a page of a prompt, rotated to another place: [L, T, 128]."""
    tokens = [*LEAD]
    for page in pages:
        tokens += PAGES[page]
    begin = len(LEAD) + SIZE * index
    kv = {name: value[:, begin : begin + SIZE] for name, value in true_kv(tokens).items()}
    local = np.arange(SIZE, dtype=np.float32)
    free = kvp.to_phase_free(LAYOUT, EngineKV(kv), local, begin)
    rotated = kvp.to_engine(LAYOUT, dict(free), local, at)
    return np.concatenate([np.asarray(rotated[name])[:, :, 0] for name in "kv"], axis=-1)


def points(report):
    return [point for point, _ in report["served"]]


def assert_page(answer, index, pages, place):
    """Asserts that a page of an answer has the rows that a prefill of these pages left at a place."""
    begin = len(LEAD) + SIZE * index
    expected = rows_of(pages, place, begin)
    np.testing.assert_allclose(answer.loaded[:, begin : begin + SIZE], expected, rtol=3e-4, atol=3e-4)


def certify(sides, **bounds):
    """Bounds points in nats, such as `near=0.04`, behind any number of chunks; survivors after up to 8 slides."""
    losses = {(point, 8 if point == "survivor" else 0): [kl] * 8 for point, kl in bounds.items()}
    sides.scheduler.certificate = certificate(losses, backbone="tiny")

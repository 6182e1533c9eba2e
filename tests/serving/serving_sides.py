"""The connector's two sides on a pool, with stand-ins for the engine's objects; each request as an engine serves it."""

import contextlib
import dataclasses
from types import SimpleNamespace

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.serving.vllm import ConnectorConfig
from kvpatch_jax.serving.vllm.engine import CacheFormat
from kvpatch_jax.serving.vllm.messages import StepCommands
from kvpatch_jax.serving.vllm.scheduler_side import SchedulerSide
from kvpatch_jax.serving.vllm.worker_side import WorkerSide
from tests.shared.arrays import placed
from tests.shared.operator_cases import turned

TOKENS = list(range(100, 130))
LAYOUT = kvp.KVLayout.gqa(2, 1, 64, kvp.Rope(1e4, 64, angles="float32"))
PAGE = 4
EVERYTHING = ("exact", "certified", "patched", "blind")


def request_of(name, params, tokens=TOKENS, **changes):
    fields = {"prompt_token_ids": tokens, "prompt_embeds": None, "lora_request": None, "mm_features": []}
    fields |= {"cache_salt": None, "block_hashes": ["early"], "kv_transfer_params": params}
    request = SimpleNamespace(request_id=name, **fields | {"skip_reading_prefix_cache": False} | changes)
    request.update_block_hashes = lambda: request.block_hashes.append(f"with {request.cache_salt}")
    return request


def output_of(scheduled, computed, blocks):
    new = [SimpleNamespace(req_id=name, num_computed_tokens=count) for name, count in computed.items()]
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens=scheduled,
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (blocks[name],)),
    )


class Pool:
    """A runner's pool of 20 blocks, and what its prefills would leave: keys that say which token of which prompt."""

    def __init__(self, dtype=np.float32):
        packing = 4 // np.dtype(dtype).itemsize  # a head, filled up
        self.kv_caches = [placed(np.zeros((20, PAGE, 1, packing, 128)), dtype) for _ in range(2)]
        self.requests = {}

    def prefill(self, name, tokens, blocks, begin=0):
        """Writes what a forward computes that has seen all in front: values depend on the whole prefix."""
        self.requests[name] = SimpleNamespace(mrope_positions=None)
        rows = rows_of_kv(true_kv(tokens))
        for layer in range(2):
            page = np.array(self.kv_caches[layer])
            for place in range(begin, len(tokens)):
                page[blocks[place // PAGE], place % PAGE, 0, 0] = rows[layer, place]
            self.kv_caches[layer] = placed(page)

    def rows(self, blocks, begin, end):
        """Returns the rows of tokens, [L, T, 128]."""
        pages = np.stack([np.asarray(layer) for layer in self.kv_caches])
        return np.stack([pages[:, blocks[place // PAGE], place % PAGE, 0, 0] for place in range(begin, end)], axis=1)


def true_kv(tokens):
    """Returns a prompt's engine-frame KV {channel: [L, T, 1, 64]}, conditioned on the prefix above the lowest layer."""
    draws = [np.random.default_rng(token).standard_normal((2, 2, 1, 64)) for token in tokens]
    rows = np.stack(draws, axis=2).astype(np.float32)
    prefix = np.cumsum(rows, axis=2) - rows
    prefix[:, 0] = 0
    keys, values = rows + 0.05 * prefix
    return {"k": turned(LAYOUT.rope, keys, np.arange(len(tokens))).astype(np.float32), "v": values}


def rows_of_kv(kv):
    """Returns KV as a pool has it, {channel: [L, T, 1, 64]} as [L, T, 128]."""
    return np.concatenate([np.asarray(kv[channel])[:, :, 0] for channel in "kv"], axis=-1)


@contextlib.contextmanager
def sides_of(folder, dtype=np.float32, weights=None, scheduling=None, forming=None, **settings):
    """Opens both sides; `scheduling` and `forming` are keyword arguments of the classes, such as a short patience."""
    defaults = {"store": str(folder / "store"), "backbone": "tiny", "rank": 10, "store_after": 1}
    config = ConnectorConfig.read(defaults | {"allow": list(EVERYTHING)} | settings)
    pool, worker = Pool(dtype), WorkerSide(config, LAYOUT, PAGE, weights, **forming or {})
    worker.register(pool)
    cache = CacheFormat(LAYOUT, np.dtype(dtype))
    scheduler = SchedulerSide(config, PAGE, cache, weights=weights, **scheduling or {})
    yield SimpleNamespace(scheduler=scheduler, worker=worker, pool=pool)
    scheduler.close()
    worker.close()


def matched_of(scheduler, request, computed=0):
    """Asks as an engine does, step after step, until the request's chunks were read."""
    for _ in range(1000):
        count = scheduler.match(request, computed)
        if count is not None:
            return count
        assert scheduler.build_commands(output_of({}, {}, {})) == StepCommands()
    raise AssertionError("its chunks are never read")


def without_rows(orders, place):
    """Returns orders in which the chunk at a place of each load has lost its last token, so it cannot be placed."""
    loads = []
    for load in orders.loads:
        payloads = list(load.payloads)
        chunk = payloads[place].chunk
        payloads[place] = payloads[place]._replace(chunk=dataclasses.replace(chunk, length=chunk.length - 1))
        loads.append(load._replace(payloads=tuple(payloads)))
    return dataclasses.replace(orders, loads=tuple(loads))


def served(sides, name, options, tokens=TOKENS, blocks=tuple(range(3, 11)), computed=0, *, lacking=None, salt=None):
    """Serves a request as an engine calls both sides; returns it, the tokens that it was matched, and the rows.

    Args:
      lacking: the place of a chunk that cannot be placed.
    """
    request = request_of(name, {"kvpatch": options}, tokens, cache_salt=salt)
    sides.scheduler.add_request(request)
    count = matched_of(sides.scheduler, request, computed)
    sides.scheduler.order_load(request, blocks, count)
    scheduled = len(tokens) - computed - count
    orders = sides.scheduler.build_commands(output_of({name: scheduled}, {name: computed + count}, {name: blocks}))
    orders = orders if lacking is None else without_rows(orders, lacking)
    sides.pool.requests[name] = SimpleNamespace(mrope_positions=None)
    sides.worker.load(orders)
    loaded = sides.pool.rows(blocks, 0, len(tokens))
    sides.pool.prefill(name, tokens, blocks, computed + count)
    sides.worker.save(orders)
    sides.worker.former.flush()
    failed = sides.worker.take_failed()
    sides.scheduler.mark_failed(failed)
    return SimpleNamespace(request=request, count=count, loaded=loaded, failed=failed, orders=orders)


def report_of(sides, answer):
    """Ends a request, and returns how it was served."""
    return sides.scheduler.finish(answer.request)["kvpatch"]

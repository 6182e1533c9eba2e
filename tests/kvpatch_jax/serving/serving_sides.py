"""The connector's two sides on a pool, with stand-ins for the engine's objects; each request as an engine serves it."""

import contextlib
import dataclasses
from types import SimpleNamespace

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.serving.vllm import ConnectorConfig
from kvpatch_jax.serving.vllm.layouts import CacheFormat
from kvpatch_jax.serving.vllm.messages import StepCommands
from kvpatch_jax.serving.vllm.scheduler_side import SchedulerSide
from kvpatch_jax.serving.vllm.worker_side import WorkerSide
from tests.arrays import placed

TOKENS = list(range(100, 130))
LAYOUT = kvp.KVLayout.gqa(2, 1, 64, kvp.Rope(1e4, 64, angles="float32"))
PAGE = 4


def request_of(name, params, tokens=TOKENS, **more):
    given = {"prompt_token_ids": tokens, "prompt_embeds": None, "lora_request": None, "mm_features": []}
    given |= {"cache_salt": None, "block_hashes": ["early"], "kv_transfer_params": params}
    given |= {"skip_reading_prefix_cache": False, **more}
    made = SimpleNamespace(request_id=name, **given)
    made.update_block_hashes = lambda: made.block_hashes.append(f"with {made.cache_salt}")
    return made


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
        packing = 4 // np.dtype(dtype).itemsize  # one head, filled up
        self.kv_caches = [placed(np.zeros((20, PAGE, 1, packing, 128)), dtype) for _ in range(2)]
        self.requests = {}

    def prefill(self, name, tokens, blocks, begin=0):
        """As an engine's forward that has seen all in front: values depend on the whole prefix, keys are turned."""
        self.requests[name] = SimpleNamespace(mrope_positions=None)
        kv = true_kv(tokens)
        for layer in range(2):
            page = np.array(self.kv_caches[layer])
            for place in range(begin, len(tokens)):
                row = np.concatenate([kv[own][layer, place, 0] for own in "kv"])
                page[blocks[place // PAGE], place % PAGE, 0, 0] = row
            self.kv_caches[layer] = placed(page)

    def rows(self, blocks, begin, end):
        """What stands in the pool of tokens, [L, T, 128]."""
        pages = np.stack([np.asarray(own) for own in self.kv_caches])
        return np.stack([pages[:, blocks[place // PAGE], place % PAGE, 0, 0] for place in range(begin, end)], axis=1)


def true_kv(tokens):
    """Engine-frame KV of a prompt {channel: [L, T, 1, 64]}; but in the lowest layer it depends on those in front."""
    rng = lambda token: np.random.default_rng(token)
    own = np.stack([rng(token).standard_normal((2, 2, 1, 64)) for token in tokens], axis=2).astype(np.float32)
    front = np.cumsum(own, axis=2) - own
    front[:, 0] = 0
    free = dict(zip("kv", own + 0.05 * front, strict=True))
    positions = np.arange(len(tokens), dtype=np.float32)
    return {name: np.asarray(value) for name, value in kvp.to_engine(LAYOUT, free, positions, 0).items()}


@contextlib.contextmanager
def sides_of(folder, dtype=np.float32, weights=None, **given):
    options = {"store": str(folder / "store"), "backbone": "tiny", "rank": 10, "uncertified": True, "patch_after": 1}
    options |= given
    settings = ConnectorConfig(**options)
    pool, worker = Pool(dtype), WorkerSide(settings, LAYOUT, PAGE, weights)
    worker.register(pool)
    scheduler = SchedulerSide(settings, PAGE, CacheFormat(LAYOUT, np.dtype(dtype)), weights=weights)
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


def let_plan(scheduler):
    """Steps of an engine that has nothing else to do, until what was asked for is planned."""
    for _ in range(100):
        assert scheduler.build_commands(output_of({}, {}, {})) == StepCommands()


def without_rows(orders, place):
    """The same orders, but the chunk at a place of each load has lost its last token: it cannot be placed."""

    def broken(load):
        payloads = list(load.payloads)
        chunk = payloads[place].chunk
        payloads[place] = payloads[place]._replace(chunk=dataclasses.replace(chunk, length=chunk.length - 1))
        return load._replace(payloads=tuple(payloads))

    return dataclasses.replace(orders, loads=tuple(broken(load) for load in orders.loads))


def served(sides, name, params, tokens=TOKENS, blocks=tuple(range(3, 11)), computed=0, lacking=None):
    """One request through both sides, as an engine calls them; returns it and the tokens that it was matched.

    Args:
      lacking: the place of a chunk that cannot be placed.
    """
    request = request_of(name, {"kvpatch": params}, tokens)
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

"""vLLM with tpu-inference on a CPU, with the connector or without. Imported before anything of vllm.

For tests and measurements of the connector alone: XLA computes attention over every key of a page table, in float32, at
any cost. It replaces functions of tpu-inference 0.32 and sets what jax and vllm read when they are imported.
"""
# pyright: reportMissingImports=false

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_ACCELERATOR_TYPE": "v6e-1",  # or tpu-inference asks a metadata host
    "TPU_NAME": "local",
    "TPU_WORKER_ID": "0",
    "TPU_SKIP_MDS_QUERY": "1",
    "MODEL_IMPL_TYPE": "flax_nnx",
    "SKIP_JAX_PRECOMPILE": "1",
    "VLLM_XLA_CHECK_RECOMPILATION": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}

import jax
import jax.numpy as jnp
import numpy as np

_JIT = jax.jit


def _jit_without_compiler_options(*args: Any, **options: Any) -> Any:
    options.pop("compiler_options", None)  # xla_tpu_*, which a CPU's compiler does not know
    return _JIT(*args, **options)


jax.jit = _jit_without_compiler_options
# Work that is dispatched aliases NumPy buffers that the runner fills again.
jax.config.update("jax_cpu_enable_async_dispatch", False)
jax.config.update("jax_platforms", "cpu")

from vllm import LLM, SamplingParams  # noqa: E402

BLOCK = 16
"""Tokens of a block."""
Answer = dict[str, Any]
"""tokens; prompt, cached: numbers of tokens; likely: log-probabilities of the first token, by token; kvpatch: the
connector's report, {} without one."""
Request = tuple[Sequence[int], Mapping[str, Any]]
"""Token ids, and options as of `Engine.ask`."""


# ------------------------------------------------------------------------------------------ replaced functions


def _attention(merge_kv: Callable[..., Any], split_kv: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a ragged paged attention: new keys are written into pages, then each token reads its request's pages."""

    def attention(q, k, v, pages, lengths, tables, begins, distribution, *_, sm_scale=1.0, **__):
        tokens, heads, width = q.shape
        kv_heads, requests = k.shape[1], lengths.shape[0]
        count, size = pages.shape[:2]
        tables = tables.reshape(requests, -1)
        places = jnp.arange(tokens)
        valid = places < begins[distribution[2]]
        owner = jnp.clip(jnp.searchsorted(begins, places, side="right") - 1, 0, requests - 1)
        position = lengths[owner] - begins[owner + 1] + places
        page = tables[owner, jnp.clip(position // size, 0, tables.shape[1] - 1)]
        pages = pages.at[jnp.where(valid, page, count), position % size].set(
            merge_kv(k, v).astype(pages.dtype), mode="drop"
        )

        grouped = q.astype(jnp.float32).reshape(tokens, kv_heads, heads // kv_heads, width)

        def attend(request, out):
            rows = pages[tables[request]].reshape(1, -1, *pages.shape[2:])
            rows = rows.reshape(*rows.shape[:2], -1, rows.shape[-1])
            keys, values = (part[0].astype(jnp.float32) for part in split_kv(rows, kv_heads, width))
            scores = jnp.einsum("tkgh,skh->tkgs", grouped, keys) * sm_scale
            visible = jnp.arange(keys.shape[0]) <= position[:, None]
            weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -1e30), axis=-1)
            answer = jnp.einsum("tkgs,skh->tkgh", weights, values)
            return jnp.where((owner == request)[:, None, None, None], answer, out)

        # One request after another: most batches have few.
        out = jax.lax.fori_loop(0, distribution[2], attend, jnp.zeros_like(grouped)).reshape(q.shape)
        return jnp.where(valid[:, None, None], out, 0).astype(q.dtype), pages

    return attention


def _interleaved(rows, kv_heads, width):
    pairs = rows[:, :, : 2 * kv_heads].reshape(*rows.shape[:2], kv_heads, 2, rows.shape[-1])
    return pairs[..., 0, :width], pairs[..., 1, :width]


def _joined(rows, kv_heads, width):
    return rows[:, :, :kv_heads, :width], rows[:, :, :kv_heads, width:]


def _flash_attention(q, k, v, *, segment_ids, sm_scale, **_):
    """Computes a tower's attention, [B, N, T, H]: tokens of one segment see each other."""
    scores = jnp.einsum("bnqh,bnkh->bnqk", q.astype(jnp.float32), k.astype(jnp.float32)) * sm_scale
    visible = segment_ids.q[:, None, :, None] == segment_ids.kv[:, None, None, :]
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    return jnp.einsum("bnqk,bnkh->bnqh", weights, v.astype(jnp.float32)).astype(q.dtype)


def _tower_angles(self, length):
    """Computes a tower's angles in float32; tpu-inference rounds them to bfloat16."""
    frequencies = 1.0 / self.theta ** (jnp.arange(0, self.dim, 2, dtype=jnp.float32) / self.dim)
    return jnp.outer(jnp.arange(length, dtype=jnp.float32), frequencies)


def _mesh(shape, names, *, devices=None):
    chosen = list(devices or jax.devices())[: int(np.prod(shape))]
    return jax.sharding.Mesh(np.array(chosen).reshape(shape), names)


def install() -> None:
    """Replaces what needs a TPU, and where tpu-inference 0.32 computes an image otherwise than its model defines.

    Our own executor, with which answers are compared, follows the model: the tower's angles in float32, and the exact
    GELU in the merger instead of the tanh form.
    """
    import tpu_inference.kernels.ragged_paged_attention.v3.kernel as wide
    import tpu_inference.kernels.ragged_paged_attention.v3.kernel_hd64 as narrow
    import tpu_inference.layers.common.attention_interface as interface
    import tpu_inference.models.jax.qwen2_5_vl as qwen2_5_vl
    import tpu_inference.runner.tpu_runner as runner
    import tpu_inference.utils as utils
    import vllm.model_executor.models.registry as registry

    interface.ragged_paged_attention = _attention(wide.merge_kv, _interleaved)
    interface.ragged_paged_attention_hd64 = _attention(narrow.merge_kv, _joined)
    interface.flash_attention = _flash_attention
    qwen2_5_vl.Qwen2_5_VisionRotaryEmbedding.__call__ = _tower_angles
    qwen2_5_vl.modeling_flax_utils.ACT2FN["gelu"] = lambda x: jax.nn.gelu(x, approximate=False)
    utils.hbm_usage_bytes = lambda devices: [(0, 512 << 20) for _ in devices]
    utils.hbm_usage_gb = lambda devices: [(0.0, 0.5) for _ in devices]
    runner.make_optimized_mesh = _mesh
    # A model's class is looked at in a process of its own, for the sake of CUDA: a minute of imports.
    registry._run_in_subprocess = lambda look: look()


install()


def mend_resumed_requests() -> None:
    """Gives requests that were not in the last batch the tokens that the scheduler has of them.

    tpu-inference 0.32 writes what it sampled under async scheduling into the next batch's rows. A request that is not
    in the next batch (preempted, or out of budget) keeps a 0 in place of its last token, and goes on behind that 0.
    The scheduler sends all tokens of such requests; `update_states` does not read them.
    """
    from tpu_inference.runner.persistent_batch_manager import PersistentBatchManager

    update_states = PersistentBatchManager.update_states

    def mended(self, output, *others):
        for request, tokens in output.scheduled_cached_reqs.all_token_ids.items():
            state = self.requests[request]
            state.output_token_ids[:] = tokens[len(state.prompt_token_ids) :]
        return update_states(self, output, *others)

    PersistentBatchManager.update_states = mended


def use_devices(count: int) -> None:
    """Splits this host into so many devices. Call it before anything is computed: jax settles their number once."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
    assert jax.device_count() == count, "something was computed before"


# --------------------------------------------------------------------------------------------------- the engine


class Engine:
    """An engine in this process, and the connector's two sides.

    Attributes:
      llm: vLLM's own face. core: the engine's core. store, backbone: the connector's root, and its model's name there.
      scheduler, worker: the connector's sides; None without one.
    """

    def __init__(
        self,
        model: Path,
        store: Path,
        settings: Mapping[str, Any] | None,
        *,
        load_failure: str = "fail",
        **options: Any,
    ):
        """Starts an engine.

        Args:
          settings: `ConnectorConfig`'s, over those that make the most of few requests; None: no connector.
          load_failure: what becomes of a request whose load fails: "fail" or "recompute".
          options: of `LLM`.
        """
        self.store, self.backbone = store, (settings or {}).get("backbone", "")
        everything = {"allow": ["exact", "certified", "patched", "blind"], "store_after": 1}
        transfer = {
            "kv_connector": "TPUOffloadConnector",
            "kv_connector_module_path": "kvpatch_jax.serving.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": load_failure,
            "kv_connector_extra_config": {"store": str(store), **everything, **(settings or {})},
        }
        defaults = {"dtype": "float32", "block_size": BLOCK, "enable_prefix_caching": True, "enforce_eager": True}
        connector = {} if settings is None else {"kv_transfer_config": transfer}
        self.llm = LLM(model=str(model), **{**defaults, **connector, **options})
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler: Any = None
        self.worker: Any = None
        if settings is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self.scheduler = self.core.scheduler.connector.scheduler_side
            self.worker = get_kv_transfer_group().worker_side

    def ask(
        self,
        *prompts: Any,
        steps: int = 8,
        fresh: bool = True,
        likely: int = 10,
        per_prompt: Any = None,
        **options: Any,
    ) -> list[Answer]:
        """Answers prompts together.

        Args:
          prompts: token ids, or what vLLM takes for them with images.
          steps: tokens of an answer.
          fresh: without what the engine's own prefix cache holds.
          likely: log-probabilities of the first token that are returned; -1: of the whole vocabulary.
          per_prompt: options of each prompt, in place of `options`.
          options: of all: the connector's, and `salt`, vLLM's cache salt, by which stores know a tenant.
        """
        if fresh:
            self.llm.reset_prefix_cache()
        if likely < 0:  # vLLM knows -1, tpu-inference does not
            likely = self.llm.llm_engine.model_config.get_vocab_size()
        inputs, params = [], []
        for index, prompt in enumerate(prompts):
            fields = dict(options if per_prompt is None else per_prompt[index])
            inputs.append(_input(prompt, fields.pop("salt", None)))
            params.append(_sampling(steps, fields, logprobs=likely))
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        self._flush()
        return [answer_of(output) for output in outputs]

    def answer(self, prompt: Any, **options: Any) -> Answer:
        """Answers one prompt; options as of `ask`."""
        return self.ask(prompt, **options)[0]

    def serve(
        self, requests: Mapping[str, Request], *, steps: int = 8, aborted: Mapping[str, int] | None = None
    ) -> dict[str, Answer]:
        """Answers text requests that arrive together. Arguments as of `add`, answers as of `finish`."""
        for id, request in requests.items():
            self.add(id, request, steps)
        return self.finish(aborted or {})

    def add(self, id: str, request: Request, steps: int = 8) -> None:
        """Adds a text request.

        Args:
          request: its tokens and options; the option `transfer` is all of `kv_transfer_params`, whatever it is.
        """
        prompt, options = request[0], dict(request[1])
        fields = _input(prompt, options.pop("salt", None))
        self.llm.llm_engine.add_request(id, fields, _sampling(steps, options, logprobs=10))

    def finish(self, aborted: Mapping[str, int]) -> dict[str, Answer]:
        """Runs the engine until all requests are answered, each with the second in which it was finished ("seconds").

        Args:
          aborted: requests whose clients hang up, and after how many steps of the engine; they have no answer.
        """
        began, answers, engine = time.perf_counter(), dict[str, Answer](), self.llm.llm_engine
        for step in itertools.count():
            for id in (id for id, last in aborted.items() if last == step):
                engine.abort_request([id])
            if not engine.has_unfinished_requests():
                break
            for output in engine.step():
                if output.finished and output.request_id not in aborted:
                    answers[output.request_id] = answer_of(output) | {"seconds": time.perf_counter() - began}
        self._flush()
        return answers

    def _flush(self) -> None:
        """Waits until the connector has stored what it forms."""
        if self.worker is not None:
            self.worker.former.flush()

    def free_blocks(self) -> int:
        """Counts blocks that no request holds."""
        return self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def tracked(self) -> int:
        """Counts requests that the connector still knows."""
        return len(self.scheduler._requests)

    def record_preemptions(self) -> list[str]:
        """Records ids of requests that are preempted from now on."""
        recorded: list[str] = []
        preempt = self.core.scheduler._preempt_request

        def recording(request: Any, *others: Any, **more: Any) -> None:
            recorded.append(request.request_id)
            preempt(request, *others, **more)

        self.core.scheduler._preempt_request = recording
        return recorded


def _input(prompt: Any, salt: str | None) -> dict[str, Any]:
    fields = dict(prompt) if isinstance(prompt, Mapping) else {"prompt_token_ids": list(prompt)}
    return fields if salt is None else {**fields, "cache_salt": salt}


def _sampling(steps: int, options: Mapping[str, Any], **more: Any) -> SamplingParams:
    """Makes greedy sampling parameters, with options for the connector if there are any."""
    extra = {"kv_transfer_params": options.get("transfer", {"kvpatch": dict(options)})} if options else None
    common: dict[str, Any] = {"temperature": 0, "detokenize": False, "ignore_eos": True}
    return SamplingParams(max_tokens=steps, extra_args=extra, **common, **more)


def answer_of(output: Any) -> Answer:
    """Reads one of vLLM's outputs."""
    first = output.outputs[0]
    logprobs = first.logprobs[0] if first.logprobs else {}
    return {
        "tokens": list(first.token_ids),
        "prompt": len(output.prompt_token_ids),
        "cached": output.num_cached_tokens,
        "likely": {token: entry.logprob for token, entry in logprobs.items()},
        "kvpatch": (output.kv_transfer_params or {}).get("kvpatch", {}),
    }


def equal_tokens(answer: Answer, reference: Answer) -> int:
    """Counts tokens that are equal up to the first that differs."""
    return int(np.cumprod(np.equal(answer["tokens"], reference["tokens"])).sum())


def difference(answer: Answer, reference: Answer) -> float:
    """Returns the largest difference of log-probabilities of tokens that both answers list."""
    common = answer["likely"].keys() & reference["likely"].keys()
    return max((abs(reference["likely"][token] - answer["likely"][token]) for token in common), default=np.nan)


def divergence(likely: Mapping[int, float], reference: Mapping[int, float]) -> float:
    """Returns KL(reference ‖ likely) in nats, of log-probabilities of the whole vocabulary."""
    assert likely.keys() == reference.keys()
    assert len(likely) > 20, "these are not all tokens"
    first, second = (np.array([part[token] for token in sorted(part)]) for part in (reference, likely))
    return float(np.sum(np.exp(first) * (first - second)))

"""tpu-inference on a CPU: its attention kernels replaced by XLA, the questions that it asks a TPU answered here.

For tests of the connector alone: attention over every key of a page table, in float32, at any cost. `prepare` sets what
is read when jax and vllm are imported; `install` replaces functions of tpu-inference 0.32, before an engine is made.
"""
# pyright: reportMissingImports=false

import importlib.metadata
import os

PACKAGES = ("vllm-tpu", "tpu-inference", "jax", "torch", "transformers", "numpy")
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_ACCELERATOR_TYPE": "v6e-1",  # or it asks a metadata host
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


def versions() -> dict[str, str]:
    """What was measured with."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def prepare() -> None:
    """Sets the environment, drops TPU compiler options, and lets nothing run behind the caller's back."""
    os.environ.update(ENVIRONMENT)
    import jax

    jit = jax.jit

    def plain(*args, **options):
        options.pop("compiler_options", None)  # xla_tpu_*, which a CPU's compiler does not know
        return jit(*args, **options)

    jax.jit = plain
    # NumPy buffers that the runner fills again are aliased by what was dispatched.
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def have_devices(count: int) -> None:
    """Makes so many devices of this host. Before anything is computed: their number is settled once per process."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
    import jax

    assert jax.device_count() == count, "something was computed before"


def _attention(merge_kv, split_kv):
    """A ragged paged attention: new keys are written into pages, then every token reads its own request's."""
    import jax
    import jax.numpy as jnp

    def attention(q, k, v, pages, lengths, tables, begins, distribution, *_, sm_scale=1.0, **__):
        tokens, heads, width = q.shape
        kv_heads, requests = k.shape[1], lengths.shape[0]
        count, size = pages.shape[:2]
        tables = tables.reshape(requests, -1)
        places = jnp.arange(tokens)
        valid = places < begins[distribution[2]]
        own = jnp.clip(jnp.searchsorted(begins, places, side="right") - 1, 0, requests - 1)
        position = lengths[own] - begins[own + 1] + places
        page = tables[own, jnp.clip(position // size, 0, tables.shape[1] - 1)]
        pages = pages.at[jnp.where(valid, page, count), position % size].set(
            merge_kv(k, v).astype(pages.dtype), mode="drop"
        )

        grouped = q.astype(jnp.float32).reshape(tokens, kv_heads, heads // kv_heads, width)

        def attend(request, out):
            rows = pages[tables[request]].reshape(1, -1, *pages.shape[2:])
            rows = rows.reshape(*rows.shape[:2], -1, rows.shape[-1])
            keys, values = (part[0].astype(jnp.float32) for part in split_kv(rows, kv_heads, width))
            scores = jnp.einsum("tkgh,skh->tkgs", grouped, keys) * sm_scale
            seen = jnp.arange(keys.shape[0]) <= position[:, None]
            weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), axis=-1)
            answer = jnp.einsum("tkgs,skh->tkgh", weights, values)
            return jnp.where((own == request)[:, None, None, None], answer, out)

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
    """A tower's attention, [B, N, T, H]: tokens of one segment see each other."""
    import jax
    import jax.numpy as jnp

    scores = jnp.einsum("bnqh,bnkh->bnqk", q.astype(jnp.float32), k.astype(jnp.float32)) * sm_scale
    seen = segment_ids.q[:, None, :, None] == segment_ids.kv[:, None, None, :]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    return jnp.einsum("bnqk,bnkh->bnqh", weights, v.astype(jnp.float32)).astype(q.dtype)


def _tower_angles(self, length):
    """What `Qwen2_5_VisionRotaryEmbedding` gives, in float32; tpu-inference rounds these angles to bfloat16."""
    import jax.numpy as jnp

    frequencies = 1.0 / self.theta ** (jnp.arange(0, self.dim, 2, dtype=jnp.float32) / self.dim)
    return jnp.outer(jnp.arange(length, dtype=jnp.float32), frequencies)


def install() -> None:
    """Replaces what needs a TPU, and what makes of an image something else than its model does.

    The second is for comparisons: our own executor is to have looked at the same images. tpu-inference 0.32 rounds the
    tower's angles to bfloat16, whatever the dtype, and has the tanh form of GELU where Qwen2.5-VL has the exact one.
    """
    import jax
    import numpy as np
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

    def mesh(shape, names, *, devices=None):
        chosen = list(devices or jax.devices())[: int(np.prod(shape))]
        return jax.sharding.Mesh(np.array(chosen).reshape(shape), names)

    runner.make_optimized_mesh = mesh
    # A model's class is looked at in a process of its own, for the sake of CUDA: a minute of imports.
    registry._run_in_subprocess = lambda look: look()


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

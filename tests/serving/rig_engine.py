"""An engine on the CPU as the scenarios use it, with the connector or without. Imported before anything of vllm."""
# pyright: reportMissingImports=false

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cpu_rig

cpu_rig.prepare()

import numpy as np  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

cpu_rig.install()

BLOCK = 16
"""Tokens of a block."""


class Engine:
    """An engine, and the connector's two sides, which live in this process.

    Attributes:
      llm: vLLM's own face. store: the connector's. scheduler, worker: the connector's sides; None without one.
      core: the engine's core. seconds: that starting took.
    """

    def __init__(
        self, model: Path, store: Path, settings: Mapping[str, Any] | None, *, recompute: bool = False, **options: Any
    ):
        """Starts it.

        Args:
          settings: of the connector, without its store; None: without a connector.
          recompute: what becomes of a load that fails; else the request fails.
          options: of `LLM`.
        """
        began = time.perf_counter()
        self.store = store
        transfer = {
            "kv_connector": "TPUOffloadConnector",
            "kv_connector_module_path": "kvpatch_jax.serving.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute" if recompute else "fail",
            "kv_connector_extra_config": {
                "store": str(store),
                "rank": 16,
                "uncertified": True,
                "patch_after": 1,
                **(settings or {}),
            },
        }
        defaults = {"dtype": "float32", "block_size": BLOCK, "enable_prefix_caching": True, "enforce_eager": True}
        own = {} if settings is None else {"kv_transfer_config": transfer}
        self.llm = LLM(model=str(model), **{**defaults, **own, **options})
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.worker = None
        if settings is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self.scheduler = self.core.scheduler.connector.scheduler_side
            self.worker = get_kv_transfer_group().worker_side
        self.seconds = time.perf_counter() - began

    def ask(
        self,
        *prompts: Any,
        steps: int = 8,
        fresh: bool = True,
        salts: Sequence[str] | None = None,
        each: Sequence[Mapping[str, Any]] | None = None,
        likely: int = 10,
        **asked: Any,
    ) -> list[dict[str, Any]]:
        """Answers prompts together.

        Args:
          prompts: token ids, or what vLLM takes for them with images.
          fresh: without what the engine's own prefix cache holds.
          each, asked: for the connector, of each prompt or of all of them.
          likely: log-probabilities that are returned of the first token.
        """
        if fresh:
            self.llm.reset_prefix_cache()
        given, options = [], []
        for place, prompt in enumerate(prompts):
            own = dict(prompt) if isinstance(prompt, Mapping) else {"prompt_token_ids": list(prompt)}
            given.append(own if salts is None else {**own, "cache_salt": salts[place]})
            params = asked if each is None else each[place]
            extra = {"kv_transfer_params": {"kvpatch": dict(params)}} if params else None
            common: dict[str, Any] = {"max_tokens": steps, "temperature": 0, "detokenize": False, "ignore_eos": True}
            options.append(SamplingParams(**common, logprobs=likely, extra_args=extra))
        outputs = self.llm.generate(given, options, use_tqdm=False)
        if self.worker is not None:
            self.worker.former.flush()
        return [answer_of(output) for output in outputs]

    def one(self, prompt: Any, **asked: Any) -> dict[str, Any]:
        """Answers one prompt."""
        return self.ask(prompt, **asked)[0]

    def abandon(self, prompt: Sequence[int], **asked: Any) -> None:
        """Asks for an answer, and no longer wants it one step later."""
        params = SamplingParams(
            max_tokens=8, temperature=0, extra_args={"kv_transfer_params": {"kvpatch": dict(asked)}}
        )
        own = self.llm.llm_engine
        own.add_request("abandoned", {"prompt_token_ids": list(prompt)}, params)
        own.step()
        own.abort_request(["abandoned"])

    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def note_logits(self) -> list[np.ndarray]:
        """Logits of every step from now on, as it happens: requests in order, then padding, by the vocabulary."""
        noted: list[np.ndarray] = []
        assert self.worker is not None
        runner = self.worker._runner
        compute = runner.compute_logits_fn

        def noting(*given: Any) -> Any:
            logits = compute(*given)
            noted.append(np.asarray(logits))
            return logits

        runner.compute_logits_fn = noting
        return noted

    def note_preemptions(self) -> list[str]:
        """Ids of requests that are preempted from now on, as it happens."""
        noted: list[str] = []
        preempt = self.core.scheduler._preempt_request

        def noting(request: Any, *others: Any, **more: Any) -> None:
            noted.append(request.request_id)
            preempt(request, *others, **more)

        self.core.scheduler._preempt_request = noting
        return noted


def answer_of(output: Any) -> dict[str, Any]:
    """What the tests look at."""
    first = output.outputs[0]
    told = (output.kv_transfer_params or {}).get("kvpatch", {})
    likely = {str(token): own.logprob for token, own in first.logprobs[0].items()}
    return {
        "tokens": list(first.token_ids),
        "prompt": len(output.prompt_token_ids),
        "cached": output.num_cached_tokens,
        "likely": likely,
        "told": told,
    }


def in_front(tokens: Sequence[int], reference: Sequence[int]) -> int:
    """Counts tokens that are equal before the first other one."""
    return int(np.cumprod([own == other for own, other in zip(tokens, reference, strict=True)]).sum())


def apart(likely: Mapping[str, float], reference: Mapping[str, float]) -> float:
    """The largest difference of log-probabilities of tokens that both have."""
    return max((abs(reference[token] - likely[token]) for token in reference.keys() & likely.keys()), default=np.nan)


def compared(answer: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """An answer beside that of the engine alone."""
    return {
        "tokens_equal_in_front": in_front(answer["tokens"], reference["tokens"]),
        "of": len(answer["tokens"]),
        "largest_difference_of_log_probabilities": apart(answer["likely"], reference["likely"]),
        "cached": answer["cached"],
        "told": answer["told"],
    }


def written(path: Path, engine: Engine, scenario: Callable[[Engine], dict[str, Any]], **more: Any) -> None:
    """Runs a scenario and writes what it found, with versions."""
    found = {"engine_seconds": round(engine.seconds, 1), **more, **scenario(engine)}
    found["versions"] = cpu_rig.versions()
    path.write_text(json.dumps(found, indent=1))

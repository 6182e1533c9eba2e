"""Engines that serve from our chunks. Nothing is imported before it is asked for: see `kvpatch_jax.serving.vllm`."""

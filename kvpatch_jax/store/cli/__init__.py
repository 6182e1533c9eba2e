"""The command line, `python -m kvpatch_jax.store`."""

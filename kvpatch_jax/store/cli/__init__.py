"""What the command line does; `python -m kvpatch_jax.store` runs it."""

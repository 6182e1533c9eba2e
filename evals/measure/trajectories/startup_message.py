"""The first line of the program. Imported before all else, because what follows takes seconds to import."""

from ...console import say_at_once

say_at_once(
    "evals.measure.trajectories.__main__", "kvpatch_jax: an agent's episodes, step by step; loading libraries …"
)

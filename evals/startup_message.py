"""The first line of the main job. Imported before all else, because what follows takes seconds to import."""

from .console import say_at_once

say_at_once("evals.run", "kvpatch_jax: a small trained model reuses cached images; loading libraries …")

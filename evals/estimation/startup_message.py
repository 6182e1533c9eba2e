"""The first line of the program. Imported before all else, because what follows takes seconds to import."""

from ..console import say_at_once

say_at_once("evals.estimation.__main__", "kvpatch_jax: structure and cheap estimates of deficits; loading libraries …")

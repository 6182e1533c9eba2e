"""The first line of the program. Imported before all else, because what follows takes seconds to import."""

from ..console import say_at_once

say_at_once("evals.certify.__main__", "kvpatch_jax: what ways of reuse lose, with bounds; loading libraries …")

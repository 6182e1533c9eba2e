"""First line of the program's output. Imported before all else, because the other imports take seconds."""

from ..console import say_at_once

say_at_once("evals.certify.__main__", "kvpatch_jax: what ways of reuse lose, with bounds; loading libraries …")

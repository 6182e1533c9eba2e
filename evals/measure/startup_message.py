"""The first line of the program. Imported before all else, because what follows takes seconds to import."""

from ..console import say_at_once

say_at_once("evals.measure.__main__", "kvpatch_jax: what reuse costs your model on your data; loading libraries …")

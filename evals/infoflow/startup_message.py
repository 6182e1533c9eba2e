"""The first line of the program. Imported before all else, because what follows takes seconds to import."""

from ..console import say_at_once

say_at_once("evals.infoflow.__main__", "kvpatch_jax: InfoFlow KV's experiments on our models; loading libraries …")

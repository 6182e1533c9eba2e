"""The first line of the program. Imported before all else, because what follows takes seconds to import."""

from ..console import say_at_once

say_at_once("evals.prompt_reuse.__main__", "kvpatch_jax: prompts of text and stored images; loading libraries …")

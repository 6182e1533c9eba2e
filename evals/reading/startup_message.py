"""The first line of the program. Imported before all else, because what follows takes seconds to import."""

from ..console import say_at_once

say_at_once(
    "evals.reading.__main__", "kvpatch_jax: pages of text as images before a pretrained decoder; loading libraries …"
)

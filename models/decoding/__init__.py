"""Running prompts and what follows them: the programs of a model, and `recompute`, `decode`, `generate` on them.

Traced: `traced` (the model without parameters), `prompt`, `cache_writes` (tokens written into a cache, the one step of
all that decodes), `continuing` (steps one after the other), `sampling`; `programs` jits them. On the host: `writing`,
`generation` and `answering` are parts of a backbone.
"""

from .answering import Answering as Answering
from .continuing import BLOCK as BLOCK
from .generation import Generating as Generating
from .generation import last_tokens as last_tokens
from .generation import pad_rows as pad_rows
from .programs import Forward as Forward
from .programs import LoadedModel as LoadedModel
from .prompt import by_layer as by_layer
from .prompt import take_tokens as take_tokens
from .text_pieces import TextPieces as TextPieces
from .traced import key_count as key_count
from .writing import Writing as Writing
from .writing import in_pages as in_pages

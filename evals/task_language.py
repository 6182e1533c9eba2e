"""Whether a checkpoint reads a task's words: a task that asks in token ids is noise to any other model."""

from collections.abc import Sequence
from pathlib import Path

from kvpatch_jax.errors import InputError
from models.inputs.texts import read_tokenizer


def check_language(checkpoint: Path, words: Sequence[str], task: str, shipped: Sequence[str]) -> None:
    """Refuses a checkpoint whose tokenizer does not have a task's words under the task's ids. No weights are read.

    Args:
      words: of the task, in the order of their ids.
      task: its name. shipped: names of the instances that were trained on it.

    Raises:
      InputError: it does not; the message says what can be measured on it.
    """
    tokenizer = read_tokenizer(checkpoint)
    ids = [] if tokenizer is None else [tokenizer.token_to_id(word) for word in words]
    if ids == list(range(len(words))):
        return

    found = "no tokenizer" if tokenizer is None else "a tokenizer with other words"
    raise InputError(
        f"backbone {str(checkpoint)!r} has {found}; expected a model that was trained on the {task} task, which asks "
        f"in {len(words)} words of its own: {', '.join(shipped)}. What reuse loses on any other model: python -m "
        "evals.certify --model=DIRECTORY --images=FOLDER (or --texts=FOLDER)"
    )

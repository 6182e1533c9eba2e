"""An agent's loop over a user's screenshots: a session, a prefix cache and a re-prefill, step by step.

    python -m evals.measure --agent --model=DIR --data=FOLDER --keep=4

Each step adds the next screenshot, in the order of their names, or (every fifth step) recalls the one that was evicted
last, and asks the same question. All three methods serve the same window:

* `session`: a `kvpatch_jax.Session` with its default options.
* `prefix cache`: one forward from the first piece on that no earlier window had at this place; what precedes it is
  cached.
* `re-prefill`: one forward over the whole window.

The loop runs twice, because the first pass compiles. The second one is reported.
"""

import collections
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens, joined_tokens
from kvpatch_jax.core import end_position
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import Buckets, ModelBackbone, load
from kvpatch_jax.window import Entry, Executor, Window

from ..harness.environment import environment
from ..harness.runner import model_path
from .agent_report import METHODS, Served, compared_answers, image_sizes, table
from .contexts import embedded, frame_of, ids_of, knows, prepared
from .fields import DESCRIBE
from .job import Request
from .media import MediaFolder
from .report import PACKAGES

KEEP, ANSWER_TOKENS = 4, 16
RECALL_EVERY = 5
"""Every so many steps the screenshot that was evicted last is recalled, which a session has not discarded yet."""
QUESTIONS = (DESCRIBE, "unit of seed?")
"""Asked by default: the first one that the tokenizer knows. The shipped models know few words."""
PAGE = 16


class AgentLoop:
    """One pass over the screenshots: a session, and an executor that serves its windows as the other methods would."""

    def __init__(
        self, backbone: ModelBackbone, front: Sequence[int], question: Sequence[int], keep: int, steps: int, pages: int
    ):
        self.backbone, self.question, self.steps = backbone, list(question), steps
        self.session = kvp.Session(backbone, keep=keep, lead=[list(front)] if front else None)
        self.asked = embedded(backbone, backbone.prepare([self.question]))
        self.executor = Executor(backbone, pages, PAGE, self.session.runtime.executor.dtype)
        # By content: tokens at positions from 0, and names of files.
        self.tokens: dict[str, Tokens] = {}
        self.names: dict[str, str] = {}
        # Contents of the pieces that earlier windows began with.
        self.prefixes: set[tuple[str, ...]] = {()}
        for piece in self.session.window.pieces:
            self.tokens[piece.entry.key] = embedded(backbone, backbone.prepare([list(front)]))

    def step(self, path: Path | None) -> tuple[str, dict[str, Served]]:
        """Adds a screenshot, or (None) recalls the one that was evicted last, and asks. Returns its name."""
        session, before = self.session, self.session.stats().tokens
        begin = time.perf_counter()
        _ = session.recall(session.gone[-1]) if path is None else session.add(path)
        answer = session.ask(self.question, steps=self.steps)
        seconds = time.perf_counter() - begin
        stats, executor = session.stats(), session.runtime.executor
        logits = session.runtime.do(lambda: executor.prefill(session.window, self.asked)).logits[0]
        slots = (stats.pages - stats.free_pages) * executor.slots.page_size
        held = slots * sum(map(_slot_bytes, executor.pools)) + stats.state_bytes + stats.canonical_bytes
        served = Served(stats.tokens - before, seconds, held, np.asarray(logits, np.float32), answer.text)

        # Every method decodes the file of a new screenshot and runs the tower; a recalled one is still embedded.
        keys = tuple(piece.entry.key for piece in session.window.pieces)
        begin = time.perf_counter()
        if path is not None:
            self.tokens[keys[-1]] = embedded(self.backbone, prepared(self.backbone, path))
            self.names[keys[-1]] = path.name
        seconds = time.perf_counter() - begin

        fronts = [keys[:count] for count in range(len(keys) + 1)]
        cached = max(len(front) for front in fronts if front in self.prefixes)
        self.prefixes.update(fronts)
        methods = {"session": served}
        for method, count in (("prefix cache", cached), ("re-prefill", 0)):
            other = self._forward(keys, count)
            methods[method] = other._replace(seconds=other.seconds + seconds)
        return self.names[keys[-1]], methods

    def _forward(self, keys: Sequence[str], cached: int) -> Served:
        """Serves a window in one forward behind its first `cached` pieces, whose KV is there when the clock starts."""
        executor, window, size = self.executor, Window.empty(self.backbone), 0
        for id, part in (("cached", keys[:cached]), ("computed", keys[cached:])):
            executor.run(window)
            if part:
                tokens = _behind_one_another([self.tokens[key] for key in part])
                executor.forget(id)
                executor.provide(id, tokens=tokens)
                window = window.append(Entry.of_tokens(id, tokens))
                size = window.pieces[-1].entry.tokens if id == "computed" else 0
        jax.block_until_ready(executor.pools)

        begin = time.perf_counter()
        logits = np.asarray(executor.ask(window, self.asked)[0][0], np.float32)
        seconds = time.perf_counter() - begin
        answer = "".join(piece.text for piece in executor.stream(window, self.asked, self.steps))
        held = window.tokens * _slot_bytes(executor.pools.engine) + executor.state_bytes
        executor.release(window.branch)
        return Served(size, seconds, held, logits, answer)


def _slot_bytes(pool: Any) -> int:
    """Returns the bytes of one token in a pool, {channel: [L,P,O,K,H]}."""
    return sum(array.nbytes // (array.shape[1] * array.shape[2]) for array in pool.values())


def _behind_one_another(parts: Sequence[Tokens]) -> Tokens:
    """Joins pieces as a window places them: each starts where the span of the one before it ends."""
    placed, start = list[Tokens](), 0
    for part in parts:
        placed.append(part.shift(start))
        start = int(np.floor(end_position(np.asarray(placed[-1].positions))[0])) + 1
    return joined_tokens(placed)


def measure(request: Request, frame: str | None, question: str | None, out: Path, command: str) -> str:
    """Plays the loop, prints a line per step, and writes agent.json. Returns the table.

    Args:
      request: model, data (a folder of screenshots), keep, answer_tokens and dtype; other fields are not used.
      frame: "chat" or "plain"; None: "chat" where the checkpoint has a template.
      question: None: the first of `QUESTIONS` that the tokenizer knows.
      command: that measured.

    Raises:
      InputError: no folder of images, too few of them, or a model that does not see images or cannot be asked in words.
      What `models.load` raises.
    """
    keep, steps = request.keep or KEEP, request.answer_tokens or ANSWER_TOKENS
    folder = Path(request.data).resolve()
    shots = MediaFolder(folder.parent).read(folder.name, "--data")
    if len(shots) < keep + 2:
        raise InputError(f"--data: got {len(shots)} screenshots; expected at least {keep + 2}, two more than --keep")
    path = model_path(request.model)
    backbone = load(str(path), dtype=request.dtype, buckets=Buckets())
    if backbone.image_config is None:
        raise InputError(f"--model: got {path.name}, which does not see images; expected a vision-language model")
    frame = frame or ("plain" if backbone.chat_template is None else "chat")
    around = frame_of(backbone, frame)
    if around.between:
        raise InputError("--frame=chat: got a template that writes between images; expected --frame=plain")
    question = question or next((text for text in QUESTIONS if knows(backbone, text)), DESCRIBE)
    asked = ids_of(backbone, around.before, question, around.behind)
    sizes = [prepared(backbone, shot)["input_ids"].shape[1] for shot in shots]
    pages = (len(around.front) + sum(sorted(sizes)[-keep - 1 :])) // PAGE + 4

    records = list[dict[str, Any]]()
    for turn in (1, 2):
        loop, queue = AgentLoop(backbone, around.front, asked, keep, steps, pages), collections.deque(shots)
        records.clear()
        with loop.session as session:
            for number in itertools.count(1):
                recalls = number % RECALL_EVERY == 0 and bool(session.gone)
                if not recalls and not queue:
                    break
                name, served = loop.step(None if recalls else queue.popleft())
                op, seconds = "recall" if recalls else "add", [f"{way} {served[way].seconds:.3g} s" for way in METHODS]
                print(f"pass {turn} of 2, step {number}, {op} {name}: {', '.join(seconds)}", flush=True)
                records.append({"step": number, "op": op, "image": name, "methods": compared_answers(served)})

    config = {"model": path.name, "fingerprint": backbone.fingerprint, "dtype": request.dtype, "keep": keep}
    config |= {"frame": frame, "lead": len(around.front), "question": question, "question_tokens": len(asked)}
    config |= {"answer_tokens": steps, "images": image_sizes(shots, sizes), "command": command}
    results = {"config": config, "environment": environment(PACKAGES), "steps": records}
    out.mkdir(parents=True, exist_ok=True)
    (out / "agent.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return table(results)

"""An agent's loop: images through a window that slides, one question each step, by three ways of serving it.

* `re-prefill`: lead, window and question in one forward, each step.
* `prefix cache`: an engine's, in blocks of 16 tokens: the longest prefix that was computed before is not run again. Of
  a window that slides, that is the lead.
* `prefix hit`: what such a cache would cost if nothing in front had changed, an append-only step: one forward over
  image and question behind a contiguous cache of the rest. No engine gets it here; it is what we are held against.
* `window`: ours, through `PagedExecutor`: survivors turn, image and question run behind them in one forward, and the
  image's KV is written into the pool.

Times are of steps with a full window; FLOPs are exact, from the backbone's own costs and the executor's ledger.
"""

import dataclasses
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.patching import one_behind_the_other
from kvpatch_jax.window import Costs, Edits, Entry, PagedExecutor, PatchNote, Window, padded_tokens
from models import ModelBackbone

from ..compilation import Compilations
from .timing import timed
from .window_material import Material, span, wait
from .window_oracle import banded_mask, history

BLOCK = 16
"""Tokens of a block of the prefix cache."""
PAGE = 16
RANK = 32
"""Of the patches that images are recalled by."""
Logits = Float[np.ndarray, " V"]


class Taken(NamedTuple):
    """One step of one way: logits behind the question, seconds on the clock, CPU seconds of all threads, FLOPs."""

    logits: Logits
    seconds: float
    cpu: float
    flops: int


@dataclasses.dataclass
class AgentWindow:
    """The window way, from an empty pool."""

    material: Material
    size: int
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        """Places the lead. Images are kept as `embed_padded` gives them, with the padding of their buckets."""
        material, dtype = self.material, self.material.images[0].embeddings.dtype
        round_up = material.backbone.buckets.round_up if material.backbone.buckets else lambda size: size
        self.padded = [padded_tokens(image, round_up(image.embeddings.shape[1])) for image in material.images]
        backbone = material.backbone
        longest = max(image.embeddings.shape[1] for image in material.images)
        lead = 0 if material.lead is None else material.lead.embeddings.shape[1]
        pages = -(-lead // PAGE) + (self.size + 2) * -(-longest // PAGE)
        self.executor = PagedExecutor(backbone, pages, PAGE, dtype)
        self.window = Window.empty(Costs.of(backbone, dtype), lead=int(material.lead is not None))
        self.forwards = 0
        if material.lead is not None:
            self.append("lead", material.lead, "text")

    def step(self, number: int) -> Taken:
        """Slides, appends an image and asks behind it: one run of edits, one forward."""
        material, executor = self.material, self.executor
        before = executor.ledger
        begin, spent = time.perf_counter(), time.process_time()
        self.window, edits = self.window.slide(self.size - 1)
        planned = time.perf_counter() - begin
        self.executor.provide(
            f"image {number}",
            tokens=self.padded[number],
            length=material.images[number].embeddings.shape[1],
            content=f"image {number}",
        )
        placed = self._appended(f"image {number}", material.images[number], "chunk")
        logits = np.asarray(executor.ask(self.window, (*edits, *placed), material.questions[number]))[0, -1]
        wait(executor.pools)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - spent
        self.forwards += 1
        done = executor.ledger - before
        if number >= self.size:
            executor.forget(f"image {number - self.size}")
        self.rows.append(
            {
                "seconds": seconds,
                "cpu": cpu,
                "planned": planned,
                "kinds": {kind: dataclasses.asdict(tally) for kind, tally in done.items()},
            }
        )
        return Taken(logits, seconds, cpu, done.total.flops)

    def recalled(self, id: str, question: Tokens, rank: int) -> tuple[Taken, Taken]:
        """Slides, brings an evicted image back by a stored patch and asks behind it: no forward but the question's.

        The patch is formed of a prefill behind that very window, off the clock, as if it had been met before.

        Returns:
          The recall; and the same window, asked behind that prefill instead: what the patch is held against.
        """
        executor, before = self.executor, self.executor.ledger
        begin, spent = time.perf_counter(), time.process_time()
        self.window, edits = self.window.slide(self.size - 1)
        executor.run(self.window, edits)
        wait(executor.pools)
        slid, slid_cpu = time.perf_counter() - begin, time.process_time() - spent
        done = executor.ledger - before

        tokens, antecedent = self.material.images[int(id.split()[-1])], self.window.target()
        executor.provide(id, tokens=tokens, content=id)
        branch, edits = self.window.fork("prefilled")
        executor.run(branch, edits)
        branch, edits = branch.recall(id, "prefill")
        prefilled = np.asarray(executor.ask(branch, edits, question))[0, -1]
        chunk, conditioned = canonical_of(self.material.plain, tokens, id), executor.read(branch, id)
        executor.release(branch.branch)
        patch = kvp.form_patch(chunk, conditioned, rank, antecedent)
        executor.provide(id, chunk=chunk, patch=patch)
        note = PatchNote.of(patch)

        before = executor.ledger
        begin, spent = time.perf_counter(), time.process_time()
        self.window, edits = self.window.recall(id, "patch", note, fetched=True)
        logits = np.asarray(executor.ask(self.window, edits, question))[0, -1]
        wait(executor.pools)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - spent
        flops = (done.total.flops, (executor.ledger - before).total.flops)
        return Taken(logits, slid + seconds, slid_cpu + cpu, sum(flops)), Taken(prefilled, 0.0, 0.0, 0)

    def append(self, id: str, tokens: Tokens, kind: Any) -> None:
        """Prefills tokens behind the window."""
        self.executor.provide(id, tokens=tokens, content=id)
        edits = self._appended(id, tokens, kind)
        self.executor.run(self.window, edits)
        self.forwards += 1

    def _appended(self, id: str, tokens: Tokens, kind: Any) -> Edits:
        """Moves on to the window with these tokens behind it; the edits are still to be run."""
        self.window, edits = self.window.append(Entry.of_tokens(id, tokens, id, kind=kind))
        return edits


class PrefixCache:
    """Which blocks of prompts were computed before: by a digest of all tokens up to their end, as engines do."""

    def __init__(self, block: int = BLOCK):
        """Holds nothing yet, and lets nothing go: no cache hits more often."""
        self.block = block
        self._known: set[bytes] = set()

    def hit(self, prompt: Sequence[tuple[str, int]]) -> int:
        """Counts the tokens at the front that need not be run, and takes the prompt in. The last one always runs.

        Args:
          prompt: what tells its tokens apart: here each piece's name and the token's number in it.
        """
        chain, found, unbroken = hashlib.blake2b(digest_size=16), 0, True
        for end in range(self.block, len(prompt) + 1, self.block):
            chain.update(repr(prompt[end - self.block : end]).encode())
            known = chain.digest() in self._known
            unbroken = unbroken and known
            found = end if unbroken else found
            self._known.add(chain.digest())
        return min(found, (len(prompt) - 1) // self.block * self.block)


class Engine:
    """The ways that prefill the window as a prompt."""

    def __init__(self, material: Material, size: int):
        """Remembers no prompt."""
        self.material, self.size = material, size
        self.cache = PrefixCache()
        self.kv: Mapping[str, Array] | None = None

    def parts(self, number: int, images: Sequence[int] | None = None) -> list[tuple[str, Tokens]]:
        """Lead, images (the last ones where none are named) and question of a step, by name and in place."""
        material = self.material
        images = range(max(0, number - self.size + 1), number + 1) if images is None else images
        named = [] if material.lead is None else [("lead", material.lead)]
        named += [(f"image {each}", material.images[each]) for each in images]
        named.append((f"question {number}", material.questions[number]))
        placed, start = [], 0
        for name, tokens in named:
            placed.append((name, tokens.shift(start)))
            start += span(tokens)
        return placed

    def prompt(self, number: int, images: Sequence[int] | None = None) -> tuple[Tokens, int]:
        """A step's prompt, and how many of its tokens the prefix cache has; `images` are those of its window."""
        parts = self.parts(number, images)
        named = [(name, each) for name, tokens in parts for each in range(tokens.embeddings.shape[1])]
        return one_behind_the_other([tokens for _, tokens in parts]), self.cache.hit(named)

    def re_prefill(self, tokens: Tokens) -> Taken:
        """Runs the whole prompt, and keeps its KV for the ways below."""
        taken, self.kv = self._run(tokens)
        return taken

    def behind(self, tokens: Tokens, hit: int) -> Taken:
        """Runs what stands behind the first `hit` tokens, over their KV as a contiguous cache has it."""
        if not hit:
            return self.re_prefill(tokens)
        assert self.kv is not None
        front = {name: value[:, :, :hit] for name, value in self.kv.items()}
        layout = self.material.plain.layout
        context = wait(kvp.to_engine(layout, front, np.asarray(tokens.positions)[:, :hit], 0))
        return self._run(tokens.take(hit, tokens.embeddings.shape[1]), hit, context)[0]

    def canonical(self, number: int) -> Taken:
        """Prefills an image alone, which storing its canonical takes."""
        return self._run(self.material.images[number])[0]

    def _run(self, tokens: Tokens, behind: int = 0, context: Any = None) -> tuple[Taken, Mapping[str, Array]]:
        """Times one forward: what it took, and its KV."""

        def forward() -> tuple[Logits, Mapping[str, Array]]:
            out = self.material.plain.prefill(tokens, context=context)
            return np.asarray(out.logits)[0, -1], out.kv

        (logits, kv), seconds, cpu = timed(forward)
        return Taken(logits, seconds, cpu, self.flops(tokens.embeddings.shape[1], behind)), kv

    def flops(self, tokens: int, behind: int) -> int:
        """FLOPs of a forward with one token's logits."""
        costs = self.material.plain.forward_costs
        return costs.flops(tokens, behind) + costs.logit


def remembered(material: Material, size: int, asked: Sequence[int]) -> dict[int, Logits]:
    """What a window that remembers promises at some steps: one forward over the whole history (`window_oracle`)."""
    spans = [span(image) for image in material.images[: max(asked) + 1]]
    segments = history(spans, size, 0 if material.lead is None else span(material.lead), asked)
    whose = {"chunk": material.images, "question": material.questions}
    parts = []
    for segment in segments:
        tokens = material.lead if segment.kind == "lead" else whose[segment.kind][segment.index]
        assert tokens is not None
        parts.append(tokens.shift(segment.start))
    counts = [part.embeddings.shape[1] for part in parts]
    mask = banded_mask(segments, counts)[None, None]
    ends = np.cumsum(counts)[-len(asked) :] - 1
    whole = one_behind_the_other(parts)
    logits = np.asarray(material.plain.prefill(whole, mask=mask, logits=ends[None].astype(np.int32)).logits)[0]
    return dict(zip(asked, logits, strict=True))


def divergence(reference: Logits, logits: Logits) -> dict[str, float]:
    """KL(reference‖logits) in nats, and whether the best token is another."""
    true, own = (np.asarray(jax.nn.log_softmax(jnp.asarray(row, jnp.float32))) for row in (reference, logits))
    kl = float((np.exp(true, dtype=np.float64) * (true.astype(np.float64) - own)).sum())
    return {"kl": kl, "flip": float(reference.argmax() != logits.argmax())}


def one_loop(
    material: Material, size: int, compared: Sequence[int], recalls: int = 0, once: bool = False
) -> dict[str, Any]:
    """Runs a loop twice, cold and warm; at the `compared` steps of the second run the other ways too.

    Args:
      size: images in the window. compared: steps with a full window, ascending; the first warms the other ways up.
      recalls: steps behind the loop that bring an image back by a stored patch; the first warms up.
      once: one run alone, for models whose steps take seconds each: what it compiles is among its times, and a prefix
        cache, which runs as many tokens as a re-prefill but for the lead, is timed at the last step alone.

    Returns:
      {"config", "cold" (but for `once`), "warm": sums and steps of a whole loop, "compared": an entry per step and way,
      "recalls": likewise, "flops": of every step, by way; "bar" is the image's prefill behind the window and the
      question's}.
    """
    compilations = Compilations()
    loops = {} if once else {"cold": _whole_loop(material, size, (), compilations)[0]}
    loops["warm"], found, agent, engine = _whole_loop(material, size, compared, compilations, once)
    recalled = [_recalled(agent, engine, number) for number in range(recalls)]
    promised = remembered(material, size, compared)
    entries = []
    for step, ways in found["ways"].items():
        for way, taken in ways.items():
            entry = {"step": step, "way": way, "seconds": taken.seconds, "cpu": taken.cpu, "flops": taken.flops}
            if way != "canonical":
                entry["forget"] = divergence(ways["re-prefill"].logits, taken.logits)
                entry["remember"] = divergence(promised[step], taken.logits)
            entries.append(entry | {"warm_up": step == compared[0]})
    config = {
        "backbone": material.name,
        "images": len(material.images),
        "window": size,
        "image_tokens": sorted({image.embeddings.shape[1] for image in material.images}),
        "question_tokens": material.questions[0].embeddings.shape[1],
        "lead_tokens": 0 if material.lead is None else material.lead.embeddings.shape[1],
        "dtype": str(material.images[0].embeddings.dtype),
        "logit_flops": material.plain.forward_costs.logit,
    }
    return {"config": config} | loops | {"compared": entries, "recalls": recalled} | found["flops"]


def _recalled(agent: AgentWindow, engine: Engine, number: int) -> dict[str, Any]:
    """One step that recalls an image, beside the other ways: what each took, by way, and KL to a prefill."""
    material = agent.material
    gone = agent.window.evicted[-agent.size].entry.id
    question = material.questions[-1]
    taken, prefilled = agent.recalled(gone, question, RANK)
    images = [int(id.split()[-1]) for id in agent.window.ids if id != "lead"]
    tokens, hit = engine.prompt(len(material.images) - 1, images)
    length, asked = tokens.embeddings.shape[1], question.embeddings.shape[1]
    behind = length - material.images[images[-1]].embeddings.shape[1] - asked
    ways = {"window": taken, "re-prefill": engine.re_prefill(tokens), "prefix hit": engine.behind(tokens, behind)}
    flops = {"prefix cache": engine.flops(length - hit, hit)} | {way: each.flops for way, each in ways.items()}
    return {
        "seconds": {way: each.seconds for way, each in ways.items()},
        "cpu": {way: each.cpu for way, each in ways.items()},
        "flops": flops,
        "to a prefill behind the window": divergence(prefilled.logits, taken.logits),
        "forget": divergence(ways["re-prefill"].logits, taken.logits),
        "warm_up": number == 0,
    }


def _whole_loop(
    material: Material, size: int, compared: Sequence[int], compilations: Compilations, once: bool = False
) -> tuple[dict[str, Any], dict[str, Any], AgentWindow, Engine]:
    """Steps once through all images: sums over the window's steps; what the other ways took, at those compared; and
    window and engine as they stand behind it.
    """
    before = compilations.count
    agent, engine = AgentWindow(material, size), Engine(material, size)
    compiled = compilations.count - before
    ways: dict[int, dict[str, Taken]] = {}
    flops: dict[str, list[int]] = {"re-prefill": [], "prefix cache": [], "prefix hit": [], "window": [], "bar": []}
    for number in range(len(material.images)):
        before = compilations.count
        taken = agent.step(number)
        compiled += compilations.count - before

        tokens, hit = engine.prompt(number)
        length, asked = tokens.embeddings.shape[1], material.questions[number].embeddings.shape[1]
        image = material.images[number].embeddings.shape[1]
        behind = length - image - asked
        flops["re-prefill"].append(engine.flops(length, 0))
        flops["prefix cache"].append(engine.flops(length - hit, hit))
        flops["prefix hit"].append(engine.flops(image + asked, behind))
        flops["window"].append(taken.flops)
        flops["bar"].append(material.plain.forward_costs.flops(image, behind) + engine.flops(asked, behind + image))
        if number in compared:
            ways[number] = {"window": taken, "re-prefill": engine.re_prefill(tokens)}
            ways[number]["prefix hit"] = engine.behind(tokens, behind)
            if not once or number == compared[-1]:
                ways[number]["prefix cache"] = engine.behind(tokens, hit)
            ways[number]["canonical"] = engine.canonical(number)
    sums = {
        "seconds": sum(row["seconds"] for row in agent.rows),
        "cpu": sum(row["cpu"] for row in agent.rows),
        "forwards": agent.forwards,
        "compilations": compiled,
        "ledger": {kind: dataclasses.asdict(tally) for kind, tally in agent.executor.ledger.items()},
        "steps": agent.rows,
    }
    return sums, {"ways": ways, "flops": {"flops": flops}}, agent, engine


def canonical_of(backbone: ModelBackbone, tokens: Tokens, id: str) -> kvp.Chunk:
    """Prefills tokens alone: their canonical, whose content is its id."""
    return kvp.Chunk(
        kv={name: value[:, 0] for name, value in backbone.prefill(tokens).kv.items()},
        local=np.asarray(tokens.positions)[0],
        span=span(tokens),
        length=tokens.embeddings.shape[1],
        id=id,
        layout=backbone.layout,
        backbone=backbone.fingerprint,
        content=id,
    )

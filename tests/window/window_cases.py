"""Windows of made-up entries, for tests that need no backbone; and a loop of real ones on an executor."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens, joined_tokens
from kvpatch_jax.window import PREFILL, Entry, Executor, PatchNote, Service, Step, Window, canonical_of
from tests.shared.window_oracle import backbone_of, rows_of, span_of, tokens_of

FINGERPRINT = "f" * 32
BAR = 2e-5
LENGTHS = (5, 7, 8)
"""All of one bucket."""


def chunk(name: str, span: int = 10, free: bool = False) -> Entry:
    return Entry(name, f"content of {name}", 10, span, "chunk", free)


def text(name: str, span: int = 4) -> Entry:
    return Entry(name, None, span, span, "text")


def window_of(*names: str, free: str = "", **options: Any) -> Window:
    """A window of a pinned text and of chunks; names that begin with "t" are texts."""
    window = Window.empty(FINGERPRINT, **options).append(text("system", 18))
    for name in names:
        window = window.append(text(name) if name.startswith("t") else chunk(name, free=name in free))
    return window


def note_of(window: Window, id: str, before: str | None = None, **changes: Any) -> PatchNote:
    """A note of a patch that was formed where a window promises a piece."""
    target = window.target(before)
    note = PatchNote("digest", id, f"content of {id}", "canonical", target, None, False, 8, 100, 5)
    return dataclasses.replace(note, **changes)


def patched(note: PatchNote, stale: bool = False) -> Service:
    return Service("patch", note, allow_stale=stale)


class Loop:
    """A loop of one window. Its chunks are c0, c1, …: images if the number is even, where the backbone reads any."""

    def __init__(self, name: str = "gqa", pages: int = 64, backbone: Any = None, lead: int = 1, **options: Any):
        self.backbone = backbone_of(name) if backbone is None else backbone
        self.executor = Executor(self.backbone, pages, 8, options.pop("dtype", jnp.float32), **options)
        self.window = Window.empty(self.backbone, lead=lead)
        self.tokens: dict[str, Tokens] = {}
        self.reads_images = name in ("mrope", "kimi", "deepstack", "gemma3", "hybrid")

    def run(self, window: Window) -> Step:
        step = self.executor.run(window)
        self.window = window
        return step

    def entry(self, id: str) -> Entry:
        """A chunk whose tokens the executor has."""
        if id not in self.tokens:
            seed = int(id[1:])
            self.tokens[id] = tokens_of(self.backbone, seed, LENGTHS[seed % 3])
            if self.reads_images and seed % 2 == 0:
                pixels = np.random.default_rng(seed).integers(0, 255, (28, 56, 3), np.uint8)
                self.tokens[id] = self.backbone.embed(**self.backbone.prepare([pixels]))
        tokens, content = self.tokens[id], f"content of {id}"
        self.executor.provide(id, tokens=tokens, content=content)
        return Entry.of_tokens(id, tokens, content, kind="chunk", order_free=True)

    def append(self, *ids: str, service: Service = PREFILL) -> Step:
        """Appends chunks, in one run."""
        window = self.window
        for id in ids:
            window = window.append(self.entry(id), service)
        return self.run(window)

    def canonical(self, id: str) -> kvp.Chunk:
        """The canonical of a chunk, as a former makes it."""
        entry, tokens = self.entry(id), self.executor.sources[id].tokens
        assert tokens is not None
        return canonical_of(self.backbone, tokens, entry)

    def conditioned(self, id: str, window: Window | None = None) -> dict[str, np.ndarray]:
        """KV of a chunk behind a window that was run, phase-free, padded as its canonical is."""
        tokens = self.tokens[id]
        kv = self.executor.prefill(self.window if window is None else window, tokens).kv
        return {name: np.asarray(value)[:, 0] for name, value in kv.items()}

    def question(self, length: int = 3) -> Tokens:
        return tokens_of(self.backbone, 99, length)

    def logits(self, window: Window | None = None) -> np.ndarray:
        """Logits of a question behind a window."""
        window = self.window if window is None else window
        return np.asarray(self.executor.prefill(window, self.question()).logits)

    def rows(self, window: Window | None = None) -> dict[str, np.ndarray]:
        """KV of a window as a forward reads it, in the order of its tokens."""
        return rows_of(self.executor, self.window if window is None else window)

    def rows_of(self, id: str, window: Window | None = None) -> dict[str, np.ndarray]:
        """Those rows of one piece."""
        window = self.window if window is None else window
        begin = sum(piece.entry.tokens for piece in window.pieces[: window.index(id)])
        end, names = begin + window.piece(id).entry.tokens, self.backbone.layout.token_channels
        rows = self.rows(window)
        return {channel.name: rows[channel.name][:, begin:end] for channel in names}

    def prompt(self, *ids: str, question: bool = False) -> Tokens:
        """Chunks right behind one another as one prompt."""
        parts, start = list[Tokens](), 0
        for tokens in [*(self.tokens[id] for id in ids), *([self.question()] if question else [])]:
            parts.append(tokens.shift(start))
            start += span_of(tokens)
        return joined_tokens(parts)


def distance(rows: dict[str, np.ndarray], expected: dict[str, Any]) -> float:
    """The largest difference, over the largest value of its channel."""
    assert rows.keys() == expected.keys()
    differences = [0.0]
    for name, value in rows.items():
        other = np.asarray(expected[name], np.float32)
        assert value.shape == other.shape, name
        differences.append(float(np.abs(np.float32(value) - other).max() / np.abs(other).max()))
    return max(differences)


def same(rows: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    """Whether all bits are equal."""
    return rows.keys() == expected.keys() and all(np.array_equal(value, expected[name]) for name, value in rows.items())

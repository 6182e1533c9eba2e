"""vLLM with the connector, measured on a CPU: `python -m evals.bench.serving --work=out/serving`.

It runs in the environment that `tests/engine/run` installs, each scenario in a process with an engine of its own. A
scenario writes its rows to WORK/NAME.json, and is not run again while they are there. --turns makes a preview;
--publish writes docs/serving.json, from which `python -m evals.harness.pages` fills docs/guides/vllm.md.

  sliding      every turn brings an image; the last eight are in the window
  reopened     every turn opens three to five of six images, in another order
  appended     every turn brings an image; all stay until a task of twelve turns ends
  four-rounds  every turn adds a line to a text in front of the last four images, as in Qwen3-VL's computer use
  documents    every turn brings a chunk of text; the last six are in the window (SmolLM2's released weights)
  trained      questions behind four images that were formed before, also by our own executor; bfloat16: in bfloat16
  pretrained   text behind two chunks that were formed before (SmolLM2's released weights)

In loops nobody forms anything by hand: all ways answer the same turns, each with a cache salt, and so a tenant, of its
own. They are compared with what the engine computes with nothing in its cache ("re-prefill"). Each loop has the
certificate that `python -m evals.certify --data` makes of windows recorded in other tasks of its kind.
"""

import collections
import dataclasses
import functools
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ..harness import intervals, program
from ..harness.frame import Row, measured_row, without_nan
from ..harness.intervals import Interval
from ..task.contexts import ITEMS, SIZES, sample
from ..task.drawing import DRAWINGS, images_of
from ..task.questions import KINDS, ask
from ..task.vocabulary import IMAGE, PAD, VISION_END, VISION_START, vocabulary
from . import engine_weights

MODEL, WORDS = "documents/qwen2_5_vl", vocabulary()
FRAME = [VISION_START, VISION_END]
"""Tokens that open and close an image."""
SEED, WINDOW, ROUNDS, PAGES, TASK = 90031, 8, 4, 6, 12
BATCH = 2 * WINDOW
"""Images at which batched eviction cuts the window to `WINDOW`."""
HISTORY = 40
"""Turns of a task of four-rounds, after which its history is empty again."""
RECORDED_SEED, RECORDED, QUESTIONS = 4711, 480, 8
"""Windows that are recorded for a certificate, one of each task, and the questions behind each."""
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "num_gpu_blocks_override": 4000,
    "async_scheduling": False,
}
IMAGES: dict[str, Any] = {
    "limit_mm_per_prompt": {"image": BATCH, "video": 0},
    "disable_chunked_mm_input": True,
    "skip_mm_profiling": True,
}
PACKAGES = ("vllm-tpu", "tpu-inference", "jax", "torch", "transformers", "numpy")
"""What results depend on beside this package."""
ROUNDING = 1e-6
"""Nats: two prefills of one prompt differ by less."""
REPREFILL, PREFIX, EVICTION = "re-prefill", "prefix cache", "batched eviction"
WAYS: dict[str, Mapping[str, Any]] = {
    REPREFILL: {},
    PREFIX: {},
    "exact": {"reuse": "exact"},
    "remember": {"reuse": "certified", "promise": "remember"},
    "certified": {"reuse": "certified"},
}

# --------------------------------------------------------------------------------------------- loops of images


class Turn(NamedTuple):
    """What one turn shows, and what it asks.

    Attributes:
      images: numbers of the images, or chunks, in the window. evicted: those that batched eviction has.
      question: its tokens. answer: the right token. lines: tokens of the history in front of the images.
    """

    images: tuple[int, ...]
    evicted: tuple[int, ...]
    question: tuple[int, ...]
    answer: int
    lines: tuple[int, ...] = ()


class Scene:
    """Sheets of the task, drawn by a seed: each shows eleven items, every one with a value and a unit.

    A question asks for the value or the unit of an item that an image of the window shows; the latest one counts.
    """

    def __init__(self, count: int, rng: np.random.Generator):
        from PIL import Image

        contexts = sample(rng, -(-count // SIZES["8"].sheets), SIZES["8"])
        sheets, _ = DRAWINGS["documents"].render(contexts)
        self.pictures = [Image.fromarray(image) for image in sheets.reshape(-1, *sheets.shape[2:])]
        # Words, bars and icons are named by tokens of their own.
        items = WORDS.first["item"] + ITEMS * contexts.document[:, None, None] + contexts.sheet_item
        columns = [
            part.reshape(-1, part.shape[2]).tolist() for part in (items, contexts.sheet_value, contexts.sheet_unit)
        ]
        self.entries = [list(zip(*sheet, strict=True)) for sheet in zip(*columns, strict=True)]
        # Certificates of this model are measured behind the first words that it has.
        self.lead = [WORDS[word] for word in ("value", "unit", "most", "values")]

    def turn(self, images: Sequence[int], rng: np.random.Generator, evicted: Sequence[int] = ()) -> Turn:
        """Draws a question about one of the images."""
        meanings = {item: meaning for image in images for item, *meaning in self.entries[image]}
        item = int(rng.choice(sorted(meanings)))
        group = "value" if rng.random() < 0.5 else "unit"
        answer = WORDS.first[group] + meanings[item][group == "unit"]
        return Turn(tuple(images), tuple(evicted or images), (WORDS[group], item), answer)

    def prompt(self, turn: Turn, images: Sequence[int]) -> dict[str, Any]:
        """Returns a prompt: the lead, the history, images and the question."""
        return image_prompt([self.pictures[image] for image in images], turn.question, (*self.lead, *turn.lines))

    def declared(self, turn: Turn) -> dict[str, Any]:
        """Returns what a request says of its chunks: nothing, since the connector finds images."""
        return {}


def vocabulary_size(model: Path) -> int:
    """Returns the number of log-probabilities that an engine gives of a whole vocabulary."""
    return json.loads((model / "config.json").read_text())["vocab_size"]


def image_prompt(pictures: Sequence[Any], question: Sequence[int], front: Sequence[int] = ()) -> dict[str, Any]:
    """Returns a prompt of text, framed images and a question, as vLLM takes it."""
    ids = [*front, *([FRAME[0], IMAGE, FRAME[1]] * len(pictures)), *question]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": list(pictures)}}


Draw = Callable[[Scene, int, np.random.Generator], Iterator[Turn]]
"""Yields so many turns of a scene."""


def sliding(scene: Scene, turns: int, rng: np.random.Generator) -> Iterator[Turn]:
    """Yields turns of a window of the last images."""
    first = 0
    for turn in range(turns):
        if turn - first + 1 > BATCH:
            first = turn - WINDOW + 1
        yield scene.turn(range(max(0, turn - WINDOW + 1), turn + 1), rng, range(first, turn + 1))


def reopened(scene: Scene, turns: int, rng: np.random.Generator) -> Iterator[Turn]:
    """Yields turns that open some of a few images in an order of their own."""
    for _ in range(turns):
        yield scene.turn(rng.permutation(PAGES)[: rng.integers(3, 6)].tolist(), rng)


def appended(scene: Scene, turns: int, rng: np.random.Generator) -> Iterator[Turn]:
    """Yields turns of tasks whose images all stay."""
    for turn in range(turns):
        yield scene.turn(range(turn - turn % TASK, turn + 1), rng)


def four_rounds(scene: Scene, turns: int, rng: np.random.Generator) -> Iterator[Turn]:
    """Yields turns of the last images behind a history: each turn adds its question, its answer and a full stop."""
    lines: list[int] = []
    for turn in range(turns):
        begin = turn - turn % HISTORY
        lines = [] if turn == begin else lines
        shown = scene.turn(range(max(begin, turn - ROUNDS + 1), turn + 1), rng)
        yield shown._replace(lines=tuple(lines))
        lines += [*shown.question, shown.answer, PAD]


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of images.

    Attributes:
      draw: its turns. turns: their number. recorded: turns of a task at which windows are recorded, one after another.
      reports: fewer turns that rows are given for too. lines: how the history is divided, as `ChunkingOptions`.
      certificate: the loop whose certificate it uses.
    """

    draw: Draw
    certificate: str
    recorded: tuple[int, ...] = ()
    turns: int = 200
    reports: tuple[int, ...] = ()
    lines: Mapping[str, Any] = dataclasses.field(default_factory=dict)


LOOPS = {
    "sliding": Loop(sliding, "sliding", (2, 4, 2 * WINDOW - 1)),
    "reopened": Loop(reopened, "reopened", (1,), reports=(60,)),
    "appended": Loop(appended, "sliding"),
    "four-rounds": Loop(four_rounds, "sliding", lines={"separators": [[PAD]], "least": 16}),
}


def measure_loop(name: str, work: Path, turns: int) -> list[Row]:
    """Answers a loop's turns in every way."""
    from .cpu_engine import Engine

    loop = LOOPS[name]
    count, certificate = turns or loop.turns, certify_images(work, loop.certificate)
    rng = np.random.default_rng(SEED)
    scene = Scene(max(count, PAGES) + 1, rng)
    drawn = list(loop.draw(scene, count, rng))
    settings = certified(certificate) | {"chunking": {"image_frame": FRAME, **loop.lines}}
    model = engine_weights.write(work / "model-loops")
    options: dict[str, Any] = OPTIONS | IMAGES | {"max_model_len": 768, "max_logprobs": vocabulary_size(model)}
    engine = Engine(model, work / f"store-{name}", settings, **options)
    answers = answer_turns(engine, drawn, scene)
    rows = []
    for report in (*(report for report in loop.reports if report < count), count):
        probe = f"{name}.{report}" if loop.reports else name
        rows += loop_rows(probe, MODEL, {way: part[:report] for way, part in answers.items()}, drawn)
    return rows


def certified(certificate: Path) -> dict[str, Any]:
    """Returns the connector's settings with a certificate, and the others as they come."""
    backbone = json.loads(certificate.read_text())["certificate"]["backbone"]
    return {"backbone": backbone, "certificate": str(certificate), "allow": ["exact", "certified"], "store_after": 2}


def answer_turns(engine: Any, turns: Sequence[Turn], scene: Any) -> dict[str, list[Any]]:
    """Answers every turn in every way, a token each.

    Args:
      scene: makes prompts, and says what requests declare, as `Scene` does.
    """
    from .cpu_engine import divergence

    answers = collections.defaultdict[str, list[Any]](list)
    for number, turn in enumerate(turns):
        ways = WAYS | ({EVICTION: {}} if any(turn.evicted != turn.images for turn in turns) else {})
        for way, fields in ways.items():
            prompt = scene.prompt(turn, turn.evicted if way == EVICTION else turn.images)
            salt = f"{way} {number}" if way == REPREFILL else way
            options = {**fields, **scene.declared(turn)} if fields else {}
            answer = engine.answer(prompt, steps=1, likely=-1, fresh=False, salt=salt, **options)
            reference = answers[REPREFILL][number]["likely"] if way != REPREFILL else answer["likely"]
            answers[way].append(answer | {"kl": divergence(answer["likely"], reference)})
        for way in ways:
            if way != REPREFILL:
                answers[way][number]["likely"] = {}  # a vocabulary's worth
        if number:
            answers[REPREFILL][number - 1]["likely"] = {}
        if number % 20 == 19:
            print(f"turn {number + 1}", flush=True)
    return answers


def loop_rows(probe: str, model: str, answers: Mapping[str, Sequence[Any]], turns: Sequence[Turn]) -> list[Row]:
    """Makes rows: tokens prefilled, also over the prefix cache's, right answers, KL, and how many keep their bound."""
    truth, rows = [answer["tokens"][0] for answer in answers[REPREFILL]], []
    prefilled = {way: _prefilled(part) for way, part in answers.items()}
    for way, part in answers.items():
        tokens, kl = [answer["tokens"][0] for answer in part], np.array([answer["kl"] for answer in part])
        kl[kl < ROUNDING] = 0
        points = collections.Counter(point for answer in part for point, _ in answer["kvpatch"].get("served", []))
        print(probe, way, int(prefilled[way].sum()), dict(points), flush=True)
        right = np.equal(tokens, [turn.answer for turn in turns[: len(part)]])
        metrics = {
            "prefilled": _total(prefilled[way]),
            "over_prefix_cache": _alone(prefilled[way].sum() / prefilled[PREFIX].sum(), len(part)),
            "right": _mean(right),
            "decisions": _mean(np.equal(tokens, truth)),
            "kl": _mean(kl),
            "largest_kl": _alone(kl.max(), len(part)),
        }
        bounds = [answer["kvpatch"].get("kl") for answer in part]
        if None not in bounds and WAYS[way].get("promise") != "remember":
            metrics["within_bound"] = _mean(kl <= np.maximum(np.array(bounds, float), ROUNDING))
        rows += [measured_row(probe, model, way, metric, interval) for metric, interval in metrics.items()]
    return rows


def _prefilled(answers: Sequence[Any]) -> np.ndarray:
    return np.array([answer["prompt"] - answer["cached"] for answer in answers])


def _mean(values: Any, cluster: Any = None) -> Interval:
    values = np.asarray(values, float)
    return intervals.mean(values, np.arange(len(values)) if cluster is None else cluster)


def _alone(value: Any, n: int) -> Interval:
    return Interval(float(value), float(value), float(value), n)


def _total(values: Any) -> Interval:
    return _alone(values.sum(), len(values))


def certify_images(work: Path, loop: str) -> Path:
    """Certifies the model on recorded windows, as an operator does with its own, once; returns the file."""
    path, folder = work / f"certificate-{loop}.json", work / f"recorded-{loop}"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    flags = [f"--model={engine_weights.SHIPPED}", f"--data={record_windows(LOOPS[loop], folder)}", f"--out={path}"]
    flags += ["--n=160", "--batch=32", "--ranks=8,16", "--skip=update,fresh,repair"]
    return _certify(path, flags)


def record_windows(loop: Loop, folder: Path) -> Path:
    """Draws windows of other tasks with the same traffic, and writes their images and their file, which is returned."""
    rng, lines = np.random.default_rng(RECORDED_SEED), list[str]()
    for task in range(RECORDED):
        count = loop.recorded[task % len(loop.recorded)] + 1
        scene = Scene(count + PAGES, rng)
        *_, shown = (turn.images for turn in loop.draw(scene, count, rng))
        questions = [scene.turn(shown, rng).question for _ in range(QUESTIONS)]
        images = [f"{task:03}-{image:02}.png" for image in shown]
        for image, name in zip(shown, images, strict=True):
            scene.pictures[image].save(folder / name)
        for question in questions:
            words = " ".join(WORDS.names[token] for token in question)
            lines.append(json.dumps({"images": images, "question": words}))
    path = folder / "windows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def _certify(path: Path, flags: Sequence[str]) -> Path:
    subprocess.run([sys.executable, "-m", "evals.certify", "--dtype=float32", *flags], check=True)
    return path


# --------------------------------------------------------------------------------------------- a loop of text

PIECES, EVICTED_AT, CONTINUED, CHUNKS = 6, 12, 8, 20
"""Chunks in the window of *documents*; those at which batched eviction evicts; tokens of what follows; chunks read of a
document."""
DOCUMENTS_KL = 0.5
"""Nats: above the certificate's bound of survivors, so that they are served."""


class Reading:
    """Documents of a language reference, one after another, in chunks as long as those of certificates.

    Attributes:
      names: of the documents.
    """

    def __init__(self, backbone: Any, turns: int):
        from kvpatch_jax import Text

        from ..certify.sources import PIECE
        from ..certify.windows import LEAD
        from ..texts.corpus import documents

        self.piece = PIECE
        read = documents(backbone, "prose", -(-turns // CHUNKS) + 1, CHUNKS * PIECE, CHUNKS * PIECE)
        self.names = [document.name for document in read]
        self.lead = np.asarray(backbone.prepare([Text(LEAD)])["input_ids"])[0].tolist()
        self.tokens = [token for document in read for token in document.ids.tolist()]

    def prompt(self, turn: Turn, chunks: Sequence[int]) -> list[int]:
        """Returns a prompt of the lead, chunks, and what follows them."""
        return [*self.lead, *self.tokens[chunks[0] * self.piece : (chunks[-1] + 1) * self.piece], *turn.question]

    def declared(self, turn: Turn) -> dict[str, Any]:
        """Returns the ends of the lead and of the chunks."""
        return {"segments": [len(self.lead) + self.piece * place for place in range(len(turn.images) + 1)]}

    def turns(self, count: int) -> Iterator[Turn]:
        """Yields turns of a window of the last chunks, of which `images` are the numbers."""
        first = 0
        for turn in range(count):
            if turn - first + 1 > EVICTED_AT:
                first = turn - PIECES + 1
            end = (turn + 1) * self.piece
            question, answer = tuple(self.tokens[end : end + CONTINUED]), self.tokens[end + CONTINUED]
            chunks = tuple(range(max(0, turn - PIECES + 1), turn + 1))
            yield Turn(chunks, tuple(range(first, turn + 1)), question, answer)


def measure_documents(work: Path, turns: int) -> list[Row]:
    """Answers what follows documents in a sliding window, in every way."""
    from .cpu_engine import Engine

    backbone, file, model = _smollm2(work)
    count = turns or 60
    reading = Reading(backbone, count)
    del backbone
    settings = certified(certify_texts(work, file, reading.names)) | {"kl": DOCUMENTS_KL}
    options: dict[str, Any] = OPTIONS | {
        "max_model_len": 1024,
        "skip_tokenizer_init": True,
        "max_logprobs": vocabulary_size(model),
    }
    engine = Engine(model, work / "store-documents", settings, **options)
    drawn = list(reading.turns(count))
    return loop_rows("documents", "smollm2", answer_turns(engine, drawn, reading), drawn)


def _smollm2(work: Path) -> tuple[Any, Path, Path]:
    """Returns the released weights, their file, and the directory that the engine loads."""
    from kvpatch_jax import models

    from ..real_weights import weights_file

    file = weights_file("smollm2")
    backbone = models.load(file, dtype="float32")
    return backbone, file, models.save(backbone, work / "model-smollm2")


def certify_texts(work: Path, model: Path, names: Sequence[str]) -> Path:
    """Certifies a model on documents of the same kind that the loop does not read, once; returns the file."""
    from ..texts.corpus import SOURCES

    path, texts = work / "certificate-documents.json", work / "recorded-documents"
    if path.exists():
        return path
    texts.mkdir(parents=True, exist_ok=True)
    for name, text in SOURCES["prose"]():
        if name not in names:
            (texts / f"{name.replace('/', ' ')}.txt").write_text(text)
    flags = [f"--model={model}", f"--texts={texts}", f"--out={path}", f"--chunks={PIECES}", "--n=40", "--batch=2"]
    return _certify(path, [*flags, "--ranks=16", "--skip=orbit,update,fresh,mean,near,repair"])


# ------------------------------------------------------------------------------- chunks that were formed before

CONTEXTS, EXECUTED = {"trained": 128, "bfloat16": 64, "pretrained": 8}, 8
"""Contexts of each scenario; those that our own executor is asked about too."""
ASKED = {"page": 1, "sheet": 1, "chain": 4, "aggregate": 3}
"""Questions of each kind behind one context."""
FORMED: dict[str, Mapping[str, Any]] = {
    REPREFILL: {},
    PREFIX: {},
    "leading": {"salt": "bare", "save": False, "reuse": "exact"},
    "blind": {"salt": "bare", "save": False, "reuse": "blind"},
    "patched": {"salt": "patched", "save": False, "reuse": "patched"},
    "certified": {"salt": "patched", "save": False, "reuse": "certified"},
}
"""Ways behind chunks that each came alone before ("bare"), and then together ("patched")."""
CHUNK, FOLLOWING, STEPS, RANK = 96, 24, 16, 32
"""Tokens of a chunk, of what follows, of an answer in *pretrained*; rank of its patches."""


class FourImages:
    """Contexts of the task, three sheets and a page each, and questions behind them.

    Attributes:
      pictures: the images of each context. tokens: of the questions [contexts, questions, 2].
      truth: the right answers [contexts, questions]; -1: not asked. kind: index into KINDS [questions].
    """

    def __init__(self, count: int):
        rng = np.random.default_rng(70117)
        drawn = sample(rng, count)
        images, questions = images_of(drawn), ask(drawn, rng, ASKED)
        self.pictures = [images[4 * index : 4 * index + 4] for index in range(count)]
        self.tokens = np.stack([questions.ids[:, columns] for columns in questions.columns()], axis=1)
        self.truth = np.stack([questions.answer[:, columns[-1]] for columns in questions.columns()], axis=1)
        self.kind = questions.kind


def measure_trained(name: str, work: Path, count: int) -> list[Row]:
    """Answers questions behind four images in every way, and compares float32 with our own executor."""
    from .cpu_engine import Engine

    contexts = FourImages(count or CONTEXTS[name])
    settings = certified(engine_weights.SHIPPED / "certificate.json") | {"chunking": {"image_frame": FRAME}}
    settings |= {"allow": ["exact", "certified", "patched", "blind"], "store_after": 1}
    model, dtype = engine_weights.write(work / "model-loops"), "bfloat16" if name == "bfloat16" else "float32"
    options: dict[str, Any] = (
        OPTIONS | IMAGES | {"dtype": dtype, "max_model_len": 256, "max_logprobs": vocabulary_size(model)}
    )
    engine = Engine(model, work / f"store-{name}", settings, **options)
    answers = answer_contexts(engine, contexts)
    executed = executor_answers(contexts) if dtype == "float32" else {}

    rows, valid = [], contexts.truth >= 0
    cluster = np.broadcast_to(np.arange(len(valid))[:, None], valid.shape)
    for way, part in answers.items():
        print(name, way, part[0][0]["kvpatch"].get("served"), flush=True)
        right = np.array([[answer["tokens"][0] for answer in row] for row in part]) == contexts.truth
        kl = np.array([[answer["kl"] for answer in row] for row in part])
        prefilled = np.array([_prefilled(row) for row in part])
        metrics = {"first": _mean(prefilled[:, 0]), "others": _mean(prefilled[:, 1:].mean(1))}
        metrics["kl"] = _mean(kl[valid], cluster[valid])
        for kind in ("chain", "aggregate"):
            chosen = valid & (contexts.kind == KINDS.index(kind))
            metrics[f"right.{kind}"] = _mean(right[chosen], cluster[chosen])
        bound = part[0][0]["kvpatch"].get("kl")
        if bound is not None:
            within = kl[valid] <= max(bound, ROUNDING)
            metrics |= {"bound": _alone(bound, 1), "within_bound": _mean(within, cluster[valid])}
        if way in executed:
            apart = []
            for row, column in np.argwhere(valid[:EXECUTED]).tolist():
                likely = part[row][column]["likely"]
                apart += [abs(executed[way][row, column, token] - likely[token]) for token in _likeliest(likely)]
            metrics["from_executor"] = _alone(max(apart), len(apart))
        rows += [measured_row(name, MODEL, way, metric, interval) for metric, interval in metrics.items()]
    return rows


def _likeliest(likely: Mapping[int, float]) -> list[int]:
    return sorted(likely, key=likely.__getitem__)[-20:]


def answer_contexts(engine: Any, contexts: FourImages) -> dict[str, list[list[Any]]]:
    """Answers all questions of each context in every way, the first one alone, once the images are formed."""
    from .cpu_engine import divergence

    answers = collections.defaultdict[str, list[list[Any]]](list)
    for index, (images, questions) in enumerate(zip(contexts.pictures, contexts.tokens.tolist(), strict=True)):
        form_images(engine, images, questions[0])
        prompts = [image_prompt(_pictures(images), question) for question in questions]
        for way, fields in FORMED.items():
            salts = [f"{way} {index} {place}" if way == REPREFILL else way for place in range(len(prompts))]
            options = [{"salt": salt, **fields} for salt in salts]
            first = engine.ask(prompts[0], steps=1, likely=-1, per_prompt=options[:1])
            row = first + engine.ask(*prompts[1:], steps=1, likely=-1, fresh=False, per_prompt=options[1:])
            for place, answer in enumerate(row):
                reference = answer if way == REPREFILL else answers[REPREFILL][index][place]
                answer["kl"] = divergence(answer["likely"], reference["likely"])
            answers[way].append(row)
        if index >= EXECUTED:
            for way, place in itertools.product(FORMED, range(len(prompts))):
                answers[way][index][place]["likely"] = {}  # a vocabulary's worth
        if index % 16 == 15:
            print(f"context {index + 1}", flush=True)
    return answers


def _pictures(images: Sequence[np.ndarray]) -> list[Any]:
    return [Image.fromarray(image) for image in images]


def form_images(engine: Any, images: Sequence[np.ndarray], question: Sequence[int]) -> None:
    """Has the engine form each image from a request of it alone, and patches from one of all of them."""
    for salt in ("bare", "patched"):
        alone = [image_prompt([picture], question) for picture in _pictures(images)]
        engine.ask(*alone, steps=1, salt=salt, reuse="exact")
    engine.answer(image_prompt(_pictures(images), question), steps=1, salt="patched", reuse="exact")


def executor_answers(contexts: FourImages) -> dict[str, np.ndarray]:
    """Computes the first contexts' answers by our own executor: log-probabilities [contexts, questions, vocabulary]."""
    import jax

    import kvpatch_jax as kvp
    from kvpatch_jax import models

    backbone = models.load(engine_weights.SHIPPED, dtype="float32")
    answers = collections.defaultdict[str, list[Any]](list)
    for pictures, tokens in zip(contexts.pictures[:EXECUTED], contexts.tokens, strict=False):
        units = [[image] for image in pictures]
        chunks = [kvp.make_chunk(backbone, unit, id=str(place)) for place, unit in enumerate(units)]
        conditioned, ids = kvp.conditioned(backbone, units), [chunk.id for chunk in chunks]
        starts = np.cumsum([0, *(chunk.span for chunk in chunks)]).tolist()
        exact, bare, patched = [], [], []
        for place, (kv, chunk, start) in enumerate(zip(conditioned, chunks, starts, strict=False)):
            front = ids[:place]
            patch = kvp.form_patch(chunk, kv, 16, front, force=True) if place else None
            exact.append(kvp.to_engine(backbone.layout, kv, chunk.local, start))
            bare.append(kvp.apply_patch(chunk, None, start, front))
            patched.append(kvp.apply_patch(chunk, patch, start, front))
        positions = np.broadcast_to(np.arange(tokens.shape[1])[:, None], (*tokens.shape, 3))
        questions = backbone.embed(tokens, positions).shift(starts[-1])
        for way, pieces in {REPREFILL: exact, "leading": exact, "blind": bare, "patched": patched}.items():
            joined = {part: np.repeat(value, len(tokens), axis=1) for part, value in kvp.joined(*pieces).items()}
            logits = backbone.prefill(questions, joined).logits[:, -1]  # pyright: ignore[reportArgumentType]
            answers[way].append(np.asarray(jax.nn.log_softmax(logits)))
    return {way: np.stack(part) for way, part in answers.items()}


def measure_pretrained(work: Path, contexts: int) -> list[Row]:
    """Answers behind two chunks of text that were formed before, in every way, sixteen tokens each."""
    from ..texts.corpus import documents
    from .cpu_engine import Engine, difference, equal_tokens

    backbone, _, model = _smollm2(work)
    texts = []
    for domain in ("prose", "code"):
        count = (contexts or CONTEXTS["pretrained"]) // 2
        texts += documents(backbone, domain, count, 2 * CHUNK + FOLLOWING, 4 * CHUNK)
    settings, options = {"backbone": backbone.fingerprint, "rank": RANK}, {"skip_tokenizer_init": True}
    del backbone
    engine = Engine(model, work / "store-pretrained", settings, max_model_len=256, **options, **OPTIONS)

    equal, apart, prefilled = (collections.defaultdict[str, list[Any]](list) for _ in range(3))
    for text in texts:
        tokens = text.ids[: 2 * CHUNK + FOLLOWING].tolist()
        first, second = tokens[:CHUNK], tokens[CHUNK : 2 * CHUNK]
        for salt in ("bare", "patched"):
            for chunk in (first, second):
                engine.answer([*chunk, 0], segments=[CHUNK], salt=salt, steps=1)
        engine.answer([*first, *second, 0], segments=[CHUNK, 2 * CHUNK], salt="patched", steps=1)
        reference = engine.answer(tokens, steps=STEPS)
        for way, fields in FORMED.items():
            if way in (REPREFILL, "certified"):
                continue
            options = {"segments": [CHUNK, 2 * CHUNK], **fields} if fields else {}
            answer = engine.answer(tokens, steps=STEPS, fresh=way != PREFIX, **options)
            equal[way].append(equal_tokens(answer, reference))
            apart[way].append(difference(answer, reference))
            prefilled[way].append(answer["prompt"] - answer["cached"])
    rows = []
    for way in equal:
        metrics = {
            "answers": _total(np.equal(equal[way], STEPS)),
            "first_tokens": _total(np.greater(equal[way], 0)),
            "difference": _alone(np.median(apart[way]), len(texts)),
            "prefilled": _alone(np.mean(prefilled[way]), len(texts)),
        }
        rows += [measured_row("pretrained", "smollm2", way, metric, interval) for metric, interval in metrics.items()]
    return rows


# --------------------------------------------------------------------------------------------------- the program

SCENARIOS: dict[str, Callable[[Path, int], list[Row]]] = {
    **{name: functools.partial(measure_loop, name) for name in LOOPS},
    "documents": measure_documents,
    "trained": functools.partial(measure_trained, "trained"),
    "bfloat16": functools.partial(measure_trained, "bfloat16"),
    "pretrained": measure_pretrained,
}


def main() -> None:
    """Runs the scenarios that --only names, one in this process, several in processes of their own."""
    from absl import flags

    from kvpatch_jax.errors import InputError

    values = flags.FLAGS
    if unknown := sorted(set(values.only) - set(SCENARIOS)):
        raise InputError(f"--only: got {unknown[0]!r}; expected some of {', '.join(SCENARIOS)}")
    work = Path(values.work).absolute()
    work.mkdir(parents=True, exist_ok=True)
    names = [name for name in values.only if not (work / f"{name}.json").exists()]
    if len(values.only) == 1:
        for name in names:
            rows = without_nan(SCENARIOS[name](work, values.turns), digits=6)
            (work / f"{name}.json").write_text(json.dumps(rows))
    else:
        for name in names:
            flag = f"--turns={values.turns}"
            subprocess.run([sys.executable, "-m", __spec__.name, f"--work={work}", f"--only={name}", flag], check=True)
    if values.publish:
        publish(work)


def publish(work: Path) -> None:
    """Writes docs/serving.json: rows of what was measured in a folder, and those that were there of all else."""
    from ..harness.environment import environment
    from ..harness.pages import ROOT
    from ..harness.report import write_published

    path, rows = ROOT / "docs" / "serving.json", list[Row]()
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    for name in SCENARIOS:
        file = work / f"{name}.json"
        former = [row for row in before if row["probe"].partition(".")[0] == name]
        rows += json.loads(file.read_text()) if file.exists() else former
    config = {"name": "serving", "command": "python -m evals.bench.serving --work=FOLDER --publish", "seed": SEED}
    write_published({"config": config, "environment": environment(PACKAGES), "rows": rows}, path)


if __name__ == "__main__":
    from absl import flags

    flags.DEFINE_string("work", None, "Folder of stores, models, certificates and rows.", required=True)
    flags.DEFINE_list("only", list(SCENARIOS), "Scenarios.")
    flags.DEFINE_integer("turns", 0, "Turns of a loop, or contexts; 0: each scenario's own number.")
    flags.DEFINE_bool("publish", False, "Also write docs/serving.json.")
    program.start(main, "evals.bench.serving: loading libraries", needs=("absl",))

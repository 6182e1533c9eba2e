"""What the shipped backbones show on held-out contexts: the claims of the main job, on one small scene.

The first backbone by default, the others marked slow.

Chance is computed from the contexts, see `chance_without_sight` and `chance_without_place`. Bars on accuracies of n
items allow three standard errors of a binomial; bars at chance, three standard errors over contexts, because the
questions of a context share colours.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evals import probes, small_task
from evals.arms import ReusedPage
from evals.probes import ResultsTable
from evals.rules import RULES
from evals.small_task import CELLS, COLOURS, GLYPHS, KINDS, VOCABULARY, Questions, scenes, sequences
from evals.small_task.instances import instance
from evals.small_task.scenes import Answers, Scene
from evals.small_task.training import SmallTaskRecipe
from evals.trained import CONTROL, MAIN, backbone_names, shipped, shipped_names
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import to_engine
from models import load
from models.checkpoints import flatten_params
from models.families.family import with_dtype

CONTEXTS, SEED = 32, 60_221
MULTI_HOP, SINGLE_HOP = ("chain", "aggregate"), ("page", "legend")
TRUE_KINDS = (*SINGLE_HOP, *MULTI_HOP)


@dataclasses.dataclass(frozen=True)
class Look:
    """One held-out scene with its questions, and what the arms answer."""

    scene: Scene
    page: ReusedPage
    questions: Questions
    said: dict[str, Answers]

    def of(self, kind: str) -> np.ndarray:
        """Which questions [B,Q] are valid ones of this kind."""
        return self.questions.valid & (self.questions.kind == KINDS.index(kind))

    def accuracy(self, answers: Answers, kind: str) -> float:
        return float((answers.predicted == self.questions.answer)[self.of(kind)].mean())

    def divergence(self, arm: str, kind: str) -> float:
        """Mean KL from re-prefill, nats."""
        return float(self.said[arm].divergence_from(self.said["re-prefill"])[self.of(kind)].mean())

    def by_context(self, values: np.ndarray, kind: str) -> np.ndarray:
        """Mean of values [B,Q] over each context's questions of this kind."""
        here = self.of(kind)
        return np.array([value[mine].mean() for value, mine in zip(values, here, strict=True) if mine.any()])

    def read(self, tokens: Tokens) -> Answers:
        """Re-prefill of these prefix tokens, then the questions."""
        kv = self.scene.backbone.prefill(tokens).kv
        return scenes.read(self.scene, scenes.engine(self.scene, kv, tokens), self.questions, sees_legends=True)


def backbones(names: list[str]) -> list:
    """The names as parameters, all but the main one marked slow."""
    return [name if name == MAIN else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module", params=backbones(backbone_names()))
def look(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Look:
    """A shipped backbone before 32 held-out contexts it was never shown while the task was designed."""
    backbone = load(shipped(request.param), dtype="float32")
    rng = np.random.default_rng(SEED)
    contexts = small_task.sample_contexts(rng, CONTEXTS)
    questions = small_task.ask(contexts, rng, dict(RULES.questions))
    scene = scenes.load_scene(backbone, contexts, tmp_path_factory.mktemp("images"))
    page = scenes.reused_page(scene)
    caches = {
        "re-prefill": page.reference,
        "blind": page.cache(),
        "patch": page.cache(page.patch(rank=16)),
    }
    ask = lambda cache: scenes.read(scene, cache, questions, sees_legends=True)
    return Look(scene, page, questions, {name: ask(cache) for name, cache in caches.items()})


# --------------------------------------------------------------------------------------------------- the claims


@pytest.mark.parametrize(("kind", "bar"), [("page", 0.95), ("legend", 0.95), ("chain", 0.95), ("aggregate", 0.75)])
def test_re_prefill_answers(look: Look, kind: str, bar: float):
    """Accuracy on held-out handwriting, less three binomial standard errors of the bar itself."""
    n = int(look.of(kind).sum())
    assert n >= 100
    assert look.accuracy(look.said["re-prefill"], kind) >= bar - 3 * (bar * (1 - bar) / n) ** 0.5


@pytest.mark.parametrize("kind", MULTI_HOP)
def test_blind_reuse_breaks_multi_hop(look: Look, kind: str):
    assert look.accuracy(look.said["blind"], kind) <= look.accuracy(look.said["re-prefill"], kind) - 0.25


@pytest.mark.parametrize("kind", SINGLE_HOP)
def test_blind_reuse_keeps_single_hop(look: Look, kind: str):
    assert abs(look.accuracy(look.said["blind"], kind) - look.accuracy(look.said["re-prefill"], kind)) <= 0.02


@pytest.mark.parametrize("kind", MULTI_HOP)
def test_a_thin_patch_brings_multi_hop_back(look: Look, kind: str):
    """Rank 16: accuracy within 0.02 of re-prefill, KL a hundredth of blind reuse's."""
    assert abs(look.accuracy(look.said["patch"], kind) - look.accuracy(look.said["re-prefill"], kind)) <= 0.02
    assert 100 * look.divergence("patch", kind) <= look.divergence("blind", kind)


@pytest.mark.slow
def test_mask_control_equals_blind_reuse(look: Look):
    """A whole prefill whose page may not look at the legends answers as blind reuse, within 1e-5 in probability."""
    mask = scenes.prefix_mask(look.scene, page_sees_legends=False)
    masked = look.scene.backbone.prefill(look.page.tokens, mask=mask).kv
    cache = scenes.engine(look.scene, masked, look.page.tokens)
    answers = scenes.read(look.scene, cache, look.questions, sees_legends=True)
    apart = np.exp(answers.log_probabilities) - np.exp(look.said["blind"].log_probabilities)
    # One page's token is in reach of all questions of its context.
    assert_close_but_for_ties(look, np.abs(apart).max(axis=(1, 2)), 1e-5, ties=1 / CONTEXTS)


def assert_close_but_for_ties(look: Look, apart: np.ndarray, bound: float, ties: float = 1e-3) -> None:
    """Asserts that all is within rounding; of a model with experts, all but a share of ties: of tokens, or of contexts.

    Two experts that score alike to the last bit are chosen by rounding, which differs between positions and processors.
    """
    allowed = ties if look.scene.backbone.config.text.experts is not None else 0
    assert (apart > bound).mean() <= allowed, np.sort(apart, axis=None)[-4:]


@pytest.mark.slow
def test_canonical_moves_exactly(look: Look):
    """Every chunk's canonical turned to another start (one per axis) is what a prefill there leaves in a cache."""
    backbone = look.scene.backbone
    axes = look.page.tokens.positions.shape[2:]
    start = np.random.default_rng(0).integers(1, 1_000_000, (CONTEXTS, *axes)).astype(np.int32)
    for chunk, canonical in zip(look.scene.images, (chunk.kv for chunk in look.scene.chunks), strict=True):
        positions = chunk.positions + start[:, None]
        there = to_engine(backbone.layout, backbone.prefill(chunk._replace(positions=positions)).kv, positions, 0)
        moved = to_engine(backbone.layout, canonical, chunk.positions, start)
        for name, expected in there.items():
            apart = np.abs(np.asarray(moved[name] - expected)).max(axis=(-2, -1))
            assert_close_but_for_ties(look, apart, 5e-6 * float(jnp.abs(expected).max()))
        turning = "k" if "k" in there else "kpe"
        assert jnp.abs(there[turning] - canonical[turning]).max() > 0.1 * jnp.abs(canonical[turning]).max()


def test_chunks_that_were_read_are_not_read_again(look: Look, tmp_path: Path):
    """Behind recoloured legends the page's files are the same, and its chunk is taken; the legends' are made anew."""
    contexts = small_task.recolour(look.scene.contexts, np.random.default_rng(0), small_task.LEGENDS)
    again = scenes.load_scene(look.scene.backbone, contexts, tmp_path, look.scene)
    *legends, page = zip(again.chunks, look.scene.chunks, strict=True)
    assert page[0] is page[1]
    assert again.images[-1] is look.scene.images[-1]
    assert all(new.id != old.id for new, old in legends)


@pytest.mark.slow
def test_recall_needs_a_fresh_patch(look: Look, tmp_path: Path):
    """A fresh patch is within 0.005 of re-prefill at every turnover; a stale one is worse once colours have changed."""
    ledger = ResultsTable("shipped")
    rng = np.random.default_rng(SEED + 1)
    probes.measure_small(ledger, "recall", look.scene, rng, np.arange(CONTEXTS), tmp_path, lambda _: None)
    found = {(row["arm"], row["metric"]): row["value"] for row in ledger.rows()}
    value = lambda arm, metric: float(str(found[arm, metric]))
    for kind in MULTI_HOP:
        for turnover in range(small_task.LEGENDS + 1):
            assert abs(value(f"fresh.turnover={turnover}", f"difference.{kind}")) <= 0.005
        gone = [value(f"stale.turnover={turnover}", f"difference.{kind}") for turnover in range(1, 4)]
        assert max(gone) <= -0.1
        assert gone[-1] <= -0.4
        assert value("stale.turnover=3", f"kl.{kind}") > 100 * value("fresh.turnover=3", f"kl.{kind}")


# ------------------------------------------------------------------------------------- does it look at the images?


def chance_without_sight(kind: str) -> float:
    """What a reader of the question alone scores: glyphs, and colours of a kind, are dealt evenly, so one over each."""
    return 1 / GLYPHS if kind == "page" else 1 / COLOURS


def candidates(look: Look, kind: str, context: int, question: int) -> np.ndarray:
    """Answers that a reader cannot tell apart who sees every cell, but not where it stands.

    page, chain: what the page's cells with the asked tag hold (one per row). legend: every swatch of the asked sort
    in the three legends. aggregate: the commonest fill of every row.
    """
    contexts, questions = look.scene.contexts, look.questions
    fill = bool(questions.ask[context, question] != VOCABULARY.ask_stripe)
    first = VOCABULARY.fill if fill else VOCABULARY.stripe
    colour = contexts.legend_fill if fill else contexts.legend_stripe
    if kind == "legend":
        return first + colour[context].ravel()
    page = contexts.page_glyph[context]
    table = small_task.latest_colours(contexts.legend_glyph, colour, contexts.order)[context]
    if kind == "aggregate":
        return first + small_task.leading_colour(table[page])[0]
    tag = (questions.argument[context, question] - VOCABULARY.cell) % CELLS
    glyphs = page[contexts.cell_tag[context] == tag]
    return VOCABULARY.glyph + glyphs if kind == "page" else first + table[glyphs]


def chance_without_place(look: Look, kind: str) -> np.ndarray:
    """[B,Q]: the probability that a candidate drawn at random, the right one among them, has the right answer.

    Σ over candidates of [answer = right] / number of candidates. For a page cell that is 1/10 + 9/10 · P(a random
    other cell with this tag has the same answer).
    """
    table = np.zeros(look.questions.answer.shape)
    for context, question in zip(*np.nonzero(look.of(kind)), strict=True):
        answer = look.questions.answer[context, question]
        table[context, question] = (candidates(look, kind, context, question) == answer).mean()
        assert table[context, question] > 0
    return table


def excess(look: Look, answers: Answers, kind: str, chance: np.ndarray | float) -> tuple[float, float]:
    """Accuracy above chance, and its standard error over contexts."""
    above = look.by_context((answers.predicted == look.questions.answer) - chance, kind)
    return float(above.mean()), float(above.std(ddof=1) / len(above) ** 0.5)


@pytest.mark.slow
def test_without_the_tower_chance_is_left(look: Look):
    """All weights of the tower zero: every kind at (or below) 1/16 for glyphs, 1/8 for colours, + 3 standard errors."""
    backbone = look.scene.backbone
    parameters = backbone.parameters
    dark = backbone.replaced({**parameters, "visual": jax.tree.map(jnp.zeros_like, parameters["visual"])})
    parts = [dark.embed(**prompts(look.scene, number)) for number in range(sequences.CHUNKS)]
    whole = lambda name: jnp.concatenate([getattr(part, name) for part in parts], axis=1)
    deepstack = None if parts[0].deepstack is None else whole("deepstack")
    answers = look.read(Tokens(whole("embeddings"), look.page.tokens.positions, deepstack))
    for kind in KINDS:
        above, error = excess(look, answers, kind, chance_without_sight(kind))
        assert above <= 3 * error, kind
        assert look.accuracy(look.said["re-prefill"], kind) > chance_without_sight(kind) + 0.5


def prompts(scene: Scene, number: int) -> dict[str, np.ndarray]:
    """One image of every context, from its rendered array, as `embed` takes it (legends by place)."""
    legends, pages = small_task.render(scene.contexts, canvas=scene.form.legend_shape)
    item = np.arange(len(scene))
    images = pages if number == small_task.LEGENDS else legends[item, scene.contexts.order[:, number]]
    each = [scene.backbone.prepare([image]) for image in images]
    return {name: np.concatenate([prompt[name] for prompt in each]) for name in each[0]}


def shuffled(look: Look, seed: int) -> np.ndarray:
    """[B,T]: a random permutation within the image tokens of every image; start and end tokens stay."""
    rng = np.random.default_rng(seed)
    form = look.scene.form
    order = np.tile(np.arange(form.prefix_tokens), (CONTEXTS, 1))
    for place in range(sequences.CHUNKS):
        inside = np.s_[:, form.cells(place)]
        order[inside] = rng.permuted(order[inside], axis=1)
    return order


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRUE_KINDS)
def test_without_places_chance_is_left(look: Look, shuffled_answers: dict[str, Answers], kind: str):
    """Image tokens at each other's places: at (or below) `chance_without_place`, + 3 standard errors.

    A token takes the height and width position of another and its turn in the reading order.
    """
    above, error = excess(look, shuffled_answers["place"], kind, chance_without_place(look, kind))
    assert above <= 3 * error


@pytest.fixture(scope="module")
def shuffled_answers(look: Look) -> dict[str, Answers]:
    """Answers when image tokens stand at each other's places, and when only their H and W positions are shuffled.

    Only for a tower that sees one cell at a time: one that sees the whole image has told every token its place.
    """
    if getattr(look.scene.backbone.config.vision, "full_layers", None) != ():
        pytest.skip("its tower sees the whole image")
    order = jnp.asarray(shuffled(look, 5))[..., None]
    tokens = look.page.tokens
    turned = jnp.take_along_axis(tokens.positions, order, axis=1)
    assert (turned[..., 0] == tokens.positions[..., 0]).all()
    assert (turned != tokens.positions).any()
    return {
        "place": look.read(Tokens(jnp.take_along_axis(tokens.embeddings, order, axis=1), tokens.positions)),
        "positions": look.read(Tokens(tokens.embeddings, turned)),
    }


# -------------------------------------------------------------------------------------------------- what is shipped


def recipe_of(name: str) -> SmallTaskRecipe:
    """What the name of a shipped instance says of its training: its architecture, its seed, its window, its steps."""
    if name == CONTROL:
        return SmallTaskRecipe(window=0.0)
    backbone, _, seed = name.partition("_seed")
    steps = (
        2400 if backbone == "llava" else SmallTaskRecipe.steps
    )  # twice the tokens, and it learns to read a legend later
    return SmallTaskRecipe(backbone=backbone, seed=int(seed or 0), steps=steps)


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_directory_is_small_and_discloses_its_training(name: str):
    """At most 4 MB, bf16, every training choice beside the weights and no other than its name says."""
    root = shipped(name)
    assert sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) <= 4_000_000
    for needed in ("config.json", "preprocessor_config.json", "model.safetensors", "tokenizer.json"):
        assert (root / needed).is_file()
    training = json.loads((root / "training.json").read_text())
    assert training["recipe"] == dataclasses.asdict(recipe_of(name))
    assert {"jax", "numpy", "optax"} <= set(training["versions"])
    loaded = load(root)
    assert loaded.answer_tokens == 1  # what it is trained for: it never learnt to end a longer answer
    floating = {path: str(leaf.dtype) for path, leaf in flatten_params(loaded.parameters).items()}
    assert {kind for path, kind in floating.items() if path[-1] != "correction"} == {"bfloat16"}
    meant = with_dtype(instance(recipe_of(name).backbone).config, "bfloat16")
    assert (loaded.config.text, loaded.config.vision) == (meant.text, meant.vision)

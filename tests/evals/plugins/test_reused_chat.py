"""Other harnesses over reused KV: the answers of a whole prefill where reuse is exact, and the shapes that they call.

lmms-eval needs torch, so its side is a double, written from the interface of lmms-eval 0.7.3.
"""

import importlib
import importlib.util
import os
import sys
import types

import numpy as np
import pytest

import kvpatch_jax as kvp
from evals.plugins import ReusedChat
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import load

STEPS = 6


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (60, 60, 3), np.uint8)


def asked(*contents, system: str | None = None) -> list[dict]:
    entries = [
        {"type": "text", "text": content} if isinstance(content, str) else {"type": "image", "image": content}
        for content in contents
    ]
    lead = [] if system is None else [{"role": "system", "content": system}]
    return [*lead, {"role": "user", "content": entries}]


@pytest.fixture(scope="module")
def backbone(checkpoint):
    return load(checkpoint("qwen2_5_vl"), dtype="float32")


def whole(backbone, messages) -> tuple[int, ...]:
    """What a prefill of the whole conversation generates greedily."""
    tokens = backbone.embed(**backbone.chat(messages))
    return tuple(int(token) for token in backbone.generate(tokens, STEPS)[0])


@pytest.mark.nightly
def test_exact_reuse_answers_as_a_prefill_of_the_conversation(backbone):
    chat = ReusedChat(backbone, approximate=False)
    first, second = picture(1), picture(2)
    for system, contents in ((None, [first, second, "hello"]), ("look", [second, first, "hi"])):
        messages = asked(*contents, system=system)
        found = chat.answer(messages, steps=STEPS)
        assert found.text == backbone.tokenizer.decode(list(whole(backbone, messages)), skip_special_tokens=False)
    chat.close()


@pytest.mark.nightly
def test_what_is_served_without_a_forward(backbone, tmp_path):
    first, second, third = picture(1), picture(2), picture(3)
    orders, prefilled = [(first, second, third), (third, first, second)] * 2, {}
    for approximate in (True, False):
        with kvp.ChunkStore(tmp_path / f"{approximate}") as store:
            chat = ReusedChat(backbone, store, approximate=approximate)
            counts = []
            for order in orders:
                found = chat.answer(asked(*order, "hello"), steps=1)
                counts.append(found.prefilled / found.prompt_tokens)
                former = chat._session(None).runtime.former
                assert former is not None
                former.flush()
            chat.close()
        prefilled[approximate] = counts
    # The same images in the same order are there. Where approximation is allowed, so is one behind the same neighbour.
    for counts in prefilled.values():
        assert counts[0] > 0.5
        assert counts[2:] == [0, 0]
    assert prefilled[True][1] < prefilled[False][1]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "got roles"),
        ([{"role": "user", "content": [{"type": "image", "image": picture(1)}]}], "the last of which is no text"),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}], "'image' with the fields"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "https://x.org/a"}, {"type": "text", "text": "a"}]}],
            "x.org",
        ),
    ],
)
def test_messages_of_another_form_are_refused(backbone, messages, message):
    with pytest.raises(kvp.errors.KVPatchError, match=message):
        ReusedChat(backbone).answer(messages)


@pytest.fixture
def lmms_eval(monkeypatch):
    """A double of lmms-eval 0.7.3: its base class, and how it finds a plugin's model and runs it."""

    class CacheHook:
        def __init__(self):
            self.kept = []

        def add_partial(self, attr, req, res):
            self.kept.append((attr, req, res))

    class Model:
        is_simple = True

        def __init__(self):
            self._rank, self._world_size, self.cache_hook, self.task_dict = 0, 1, CacheHook(), {}

        @classmethod
        def create_from_arg_string(cls, text, additional=None):
            pairs = dict(pair.split("=", 1) for pair in text.split(","))
            return cls(**pairs, **{name: value for name, value in (additional or {}).items() if value is not None})

        def clean(self):
            self.cleaned = True

    modules = {name: types.ModuleType(name) for name in ("lmms_eval", "lmms_eval.api", "lmms_eval.api.model")}
    vars(modules["lmms_eval.api.model"])["lmms"] = Model
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("LMMS_EVAL_PLUGINS", "evals.plugins.lmms")

    def get_model(name: str):
        plugin = os.environ["LMMS_EVAL_PLUGINS"]
        # The command line looks for the tasks of every plugin first.
        tasks = importlib.util.find_spec(f"{plugin}.tasks")
        assert tasks is not None
        assert tasks.submodule_search_locations
        class_name = importlib.import_module(f"{plugin}.models").AVAILABLE_MODELS[name]
        model = getattr(importlib.import_module(f"{plugin}.models.{name}"), class_name)
        assert issubclass(model, Model)
        assert model.is_simple
        return model

    yield get_model
    sys.modules.pop("evals.plugins.lmms.models.kvpatch", None)


@pytest.mark.nightly
def test_lmms_eval_finds_the_plugin_and_runs_its_requests(lmms_eval, checkpoint, backbone, tmp_path):
    image_module = pytest.importorskip("PIL.Image")
    arguments = f"pretrained={checkpoint('qwen2_5_vl')},store={tmp_path / 'chunks'},dtype=float32,approximate=False"
    model = lmms_eval("kvpatch").create_from_arg_string(arguments, {"batch_size": 1, "device": None})
    documents = [{"page": picture(number), "question": f"hello{number % 2}"} for number in (1, 1, 2)]
    model.task_dict = {"pages": {"test": documents}}
    options = {"max_new_tokens": STEPS, "temperature": 0, "until": ["\n\n"]}
    visuals = lambda document: [image_module.fromarray(document["page"])]
    requests = []
    for number, document in enumerate(documents):
        arguments = "<image>" + document["question"], options, visuals, number, "pages", "test"
        requests.append(types.SimpleNamespace(args=arguments))
    answers = model.generate_until(requests)
    expected = [whole(backbone, asked(document["page"], document["question"])) for document in documents]
    assert answers == [backbone.tokenizer.decode(list(ids), skip_special_tokens=False) for ids in expected]
    assert [kept[2] for kept in model.cache_hook.kept] == answers
    with pytest.raises(NotImplementedError, match="likelihoods"):
        model.loglikelihood([])
    model.clean()
    assert model.cleaned


def test_lmms_evals_absence_and_other_arguments_are_named(lmms_eval):
    with pytest.raises(InputError, match=r"model_args: got \['pretrainde'\]; expected pretrained"):
        lmms_eval("kvpatch").create_from_arg_string("pretrained=nowhere,pretrainde=x")

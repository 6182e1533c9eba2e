"""Images, texts and token ids are told apart everywhere, images have one form, and bare strings are no sequences."""
# pyright: reportArgumentType=false

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from operator_cases import chunk_of, conditioned_of
from PIL import Image

import kvpatch_jax as kvp
from kvpatch_jax.batch import BatchItem
from kvpatch_jax.batch.batch_items import listed
from kvpatch_jax.cache.content import looks_like_a_file
from kvpatch_jax.errors import AmbiguousTextError, ImageError, InputError, KVPatchError
from kvpatch_jax.store import ChunkStore, DynamicLibrary, Linker, PatchKey, Request, StaticLibrary, chunk_id, encoder_id
from models import load
from models.inputs.chat import read_messages

RGB = np.random.default_rng(3).integers(0, 256, (24, 40, 3), np.uint8)
ALPHA = np.concatenate([RGB, np.random.default_rng(4).integers(0, 255, (24, 40, 1), np.uint8)], axis=2)


@pytest.fixture(scope="module")
def backbone():
    return load(Path(__file__).parents[3] / "evals" / "trained" / "documents" / "qwen2_5_vl", dtype="float32")


@pytest.fixture
def shot(tmp_path: Path) -> Path:
    """A file of the pixels RGB."""
    Image.fromarray(RGB).save(tmp_path / "shot.png")
    return tmp_path / "shot.png"


@pytest.fixture
def store(tmp_path: Path):
    with ChunkStore(tmp_path / "store") as store:
        yield store


def page() -> np.ndarray:
    """An image that the small backbone takes."""
    return np.random.default_rng(5).integers(0, 256, (32, 48, 3), np.uint8)


# ------------------------------------------------------------------------------------------- a str is a text, or a file

FILES = (
    *("nope.png", "shot1.pgn", "clip.mp4", "SHOT.JPEG", "a@2x.webp", "bilder/größe.png", "请看shot.png", "notes.txt"),
    *("my shot.png", "Screen Shot 2024-05-01 at 10.32.11 AM.png", "describe shot.png", " shot.png\n"),
    *("https://example.org/a", "HTTP://x", "s3://bucket/key", "gs://b", "file:/x", "file:///x", "example.com"),
    *("data:image/png;base64,iVBO", "data:video/mp4;base64,AA AA\nAA"),
    *("/tmp/x", "./x", "../x", "~/x", "~user/x", "C:\\x", "c:/x", "\\\\host\\x", "/home/用户/截图"),
    *("shots/run_1", "shots/1", "frames/", "Qwen/Qwen2.5-VL"),
)
TEXTS = (
    *("What is in shot.png?", "see https://example.org for more", "https://example.org is down", "Look at shot.png."),
    *("and/or", "km/h", "he/she/they", "1/2", "24/7", "2024/05/01", "12.5/100", "和/或", "I/O", "image/png"),
    *("one\nshot.png", "The words of this line are more than any name has: shot.png", "3.14", "v1.2", "U.S.", "e.g."),
    *("", "w5 w6", "...", "wait...what", ".", "..", "/", "//", "~", "</think>", "<|im_end|>", "print(x.shape)"),
    *(
        "IMAGE#LOUVRE2025",
        "\\alpha",
        "data:",
        r"file \(it",
        "C:",
        "你好",
        "a" * 5000,
        "x" * 5000 + ".png",
        "nul\0inside",
    ),
)


def entries(backbone, session, store) -> dict[str, Callable[[str], object]]:
    """Every way in which a str comes in."""
    library, dynamic = StaticLibrary(store, quota=1 << 20), DynamicLibrary(store)
    linker = Linker(backbone.fingerprint, library)

    def batched(text: str, **place: object) -> None:
        for refused in listed([{"front": [text], "question": text, **place}], backbone.fingerprint).rejected:
            raise refused.error

    return {
        "prepare": lambda text: backbone.prepare([text]),
        "make_chunk": lambda text: kvp.make_chunk(backbone, [text]),
        "lead": lambda text: kvp.make_chunk(backbone, [[1]], lead=[text]),
        "conditioned": lambda text: kvp.conditioned(backbone, [[[1]], [text]]),
        "chunk_id": lambda text: chunk_id("model", text),
        "add": session.add,
        "recall": session.recall,
        "replace": lambda text: session.replace(session.ids[0], text),
        "ask": lambda text: session.ask(text, steps=1),
        "ask with several": lambda text: session.ask([text, [1]], steps=1),
        "front": lambda text: batched(text, question=[1]),
        "question": lambda text: batched(text, front=[]),
        "link": linker.link,
        "static": lambda text: library.put("x", text),
        "dynamic": lambda text: dynamic.publish("x", text),
        "chat": lambda text: read_messages([{"role": "user", "content": text}]),
    }


def is_refused(call: Callable[[str], object], text: str) -> bool:
    """Whether a text is refused as ambiguous; that its words are not in the vocabulary does not matter here."""
    try:
        call(text)
    except AmbiguousTextError:
        return True
    except KVPatchError:
        pass
    return False


@pytest.fixture(scope="module")
def ways_in(backbone, tmp_path_factory):
    with ChunkStore(tmp_path_factory.mktemp("store")) as store, kvp.Session(backbone) as session:
        session.add([1, 2])
        yield entries(backbone, session, store)


@pytest.mark.slow
def test_what_looks_like_a_file_is_refused_wherever_a_text_goes(ways_in, unchecked: None):
    """The message says how to pass either."""
    for call in ways_in.values():
        for text in FILES:
            with pytest.raises(AmbiguousTextError, match=r"pathlib\.Path\(.*kvpatch_jax\.Text\("):
                call(text)


@pytest.mark.slow
@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    st.one_of(
        st.text("aZ9. /\\:~?\n-_é", max_size=12),
        st.builds("{}{}{}".format, st.text("ax9 ./"), st.sampled_from([".png", ".mp4", ".pgn", "?"]), st.text(" .?")),
        st.builds("{}{}".format, st.sampled_from(["https://", "see s3://", "data:image/png;", "~/"]), st.text("a /.")),
    )
)
def test_every_way_in_has_one_verdict(ways_in, text: str):
    verdicts = {name: is_refused(call, text) for name, call in ways_in.items()}
    assert set(verdicts.values()) == {looks_like_a_file(text)}, verdicts


def test_files_that_are_there_change_no_verdict(backbone, shot, monkeypatch):
    """So that a batch, a prompt and a test mean the same on every machine."""
    monkeypatch.chdir(shot.parent)
    before = backbone.prepare(["C6"])["input_ids"]
    (shot.parent / "C6").write_text("")  # a word of the small backbone's vocabulary
    assert np.array_equal(before, backbone.prepare(["C6"])["input_ids"])


def test_a_text_may_look_like_a_file(store):
    library = StaticLibrary(store, quota=1 << 20)
    for reference in (library.put("a", "x.png", kind="TEXT"), library.put("b", kvp.Text("x.png"))):
        resource = library.get(reference.kind, reference.name)
        assert resource is not None
        assert (reference.kind, resource.content) == ("TEXT", "x.png")
        assert resource.chunk_id("model") == chunk_id("model", kvp.Text("x.png"))


def test_a_prompt_with_references_is_text_whatever_it_ends_in(store):
    library = StaticLibrary(store, quota=1 << 20)
    library.put("X", [1, 2])
    with Linker("model", library).link("TOKENS#X as shot.png") as linked:
        assert linked.items == [[1, 2], " as shot.png"]
        assert isinstance(linked.items[1], kvp.Text)


def test_an_assistant_may_have_answered_with_the_name_of_a_file():
    said = [{"role": "assistant", "content": "shot.png"}]
    said += [{"role": "user", "content": [{"type": "text", "text": "shot.png"}]}]
    assert read_messages(said) == (said, [])


def test_items_from_json_say_what_is_an_image(tmp_path):
    """The same ids as of a path and a `Text`; a str alone is refused, and the message says the way."""
    Image.fromarray(page()).save(tmp_path / "page.png")
    path = str(tmp_path / "page.png")
    lines = [
        json.dumps({"front": [{"image": path}, {"text": "a.png"}], "question": {"text": "b.png"}}),
        json.dumps({"front": [path], "question": "What?"}),
        json.dumps({"front": [{"image": 3}], "question": "What?"}),
        json.dumps({"front": [{"images": path}], "question": "What?"}),
        json.dumps({"front": [{"image": "https://example.org/a.png"}], "question": "What?"}),
    ]
    found = listed([json.loads(line) for line in lines], "model")
    by_hand = BatchItem([tmp_path / "page.png", kvp.Text("a.png")], kvp.Text("b.png"))
    assert found.resolved == listed([by_hand], "model").resolved
    said = [str(refused.error) for refused in found.rejected]
    assert re.search(r'in JSON \{"image": \.\.\.\}, \{"video": \.\.\.\} or \{"text": \.\.\.\}', said[0])
    assert "item.front 0: got item of type int" in said[1]
    assert "item.front 0: got a part of type None with the fields ['images']" in said[2]
    assert "an address; expected its bytes or a file: fetch it first" in said[3]


def test_a_batch_of_nothing_but_names_of_files_is_refused_before_a_line_is_written(backbone, tmp_path):
    items = [{"front": [f"page {number}.png"], "question": "C6"} for number in range(3)]
    with pytest.raises(AmbiguousTextError, match=r"got 3 invalid items: .*page 0\.png.*in JSON"):
        kvp.answer_batch(backbone, None, items, out=tmp_path / "answers.jsonl")
    assert not (tmp_path / "answers.jsonl").exists()


def test_a_path_is_an_image_in_every_place(backbone, store, tmp_path):
    Image.fromarray(page()).save(tmp_path / "page.png")
    path, library = tmp_path / "page.png", StaticLibrary(store, quota=1 << 20)
    by_path, by_pixels = (backbone.prepare([item]) for item in (path, page()))
    assert all(np.array_equal(by_path[name], by_pixels[name]) for name in by_pixels)
    reference = library.put("PAGE", path)
    assert reference.kind == "IMAGE"
    resource = library.get("IMAGE", "PAGE")
    assert resource is not None
    assert resource.content == path.read_bytes()
    assert np.array_equal(resource.item, page())
    with pytest.raises(InputError, match=r"gone\.png"):
        library.put("GONE", tmp_path / "gone.png")


def test_token_ids_are_tokens_as_a_list_and_as_a_vector(backbone, unchecked: None):
    ids = [[5, 9, 12], (5, 9, 12), np.array([5, 9, 12]), jnp.array([5, 9, 12])]
    prompts = [backbone.prepare([each])["input_ids"].tolist() for each in ids]
    assert prompts == [[[5, 9, 12]]] * 4
    for item in (5, 1.5, None, {"image": "page.png"}, b"no image", [1.5], [True]):
        with pytest.raises(InputError, match="expected text, token ids or an image"):
            backbone.prepare([item])


# ------------------------------------------------------------------------------------------------- one form of images


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


def test_an_image_has_one_id_however_it_is_given(shot):
    image = Image.fromarray(RGB)
    ways = [RGB, jnp.asarray(RGB), image, shot, shot.read_bytes(), encoded(image, "TIFF"), image.convert("RGBA")]
    ways += [np.dstack([RGB, np.full(RGB.shape[:2], 255, np.uint8)]), RGB.copy(order="F"), Image.open(shot)]
    assert {chunk_id("model", way) for way in ways} == {chunk_id("model", RGB)}
    grey = RGB[..., 0]
    ways = [grey, grey[..., None], Image.fromarray(grey), np.dstack([grey] * 3), encoded(Image.fromarray(grey))]
    assert len({chunk_id("model", way) for way in ways}) == 1
    colours = Image.fromarray(RGB).quantize(16)
    ways = [colours, colours.convert("RGB"), encoded(colours), np.array(colours.convert("RGB"))]
    assert len({chunk_id("model", way) for way in ways}) == 1


def test_other_pixels_have_another_id():
    other = RGB.copy()
    other[3, 7, 1] ^= 1
    ids = [chunk_id("model", image) for image in (RGB, other, RGB[:, :, ::-1].copy(), RGB.transpose(1, 0, 2), ALPHA)]
    assert len(set(ids)) == len(ids)


def test_bytes_that_only_begin_as_an_image_are_bytes():
    for content in (b"BM", b"BMW is a car", b"\x89PNG", encoded(Image.fromarray(RGB))[:100]):
        assert len(chunk_id("model", content)) == 64


def test_an_image_that_cannot_be_read_has_no_id(tmp_path):
    for image in (tmp_path / "gone.png", Image.fromarray(np.zeros((4, 4), np.uint16))):
        with pytest.raises(ImageError, match=r"expected|rescale"):
            chunk_id("model", image)


def test_ids_come_from_the_content_by_default(backbone, tmp_path):
    """As a library and the linker name it, so that what was computed by hand is found by its reference."""
    Image.fromarray(page()).save(tmp_path / "page.png")
    first = kvp.make_chunk(backbone, [tmp_path / "page.png"])
    assert first.id == kvp.make_chunk(backbone, [page()]).id == kvp.make_chunk(backbone, [Image.fromarray(page())]).id
    assert first.id == chunk_id(backbone.fingerprint, page())
    assert first.id != kvp.make_chunk(backbone, [page()[::-1].copy()]).id
    assert kvp.make_chunk(backbone, ["C6"]).id == chunk_id(backbone.fingerprint, "C6")
    assert kvp.make_chunk(backbone, ["C6", [13]]).id == chunk_id(backbone.fingerprint, "C6", [13])
    assert kvp.make_chunk(backbone, [page()], id="page").id == "page"


# --------------------------------------------------------------------------------------- bare strings and single items


def test_a_single_item_is_no_sequence_of_items(backbone, unchecked: None):
    for items in (
        "a b c",
        kvp.Text("a b c"),
        page(),
        jnp.asarray(page()),
        Path("page.png"),
        Image.fromarray(page()),
        7,
    ):
        for call in (
            lambda items=items: backbone.prepare(items),
            lambda items=items: kvp.make_chunk(backbone, items, "x"),
        ):
            with pytest.raises(InputError, match="expected a sequence of items"):
                call()
    with pytest.raises(InputError, match="expected at least one"):
        backbone.prepare([])
    assert backbone.prepare(item for item in [[1], [2]])["input_ids"].tolist() == [[1, 2]]


def test_a_bare_antecedent_is_refused_by_every_operator(unchecked: None):
    chunk = chunk_of("gqa")
    conditioned = conditioned_of(chunk)
    patch = kvp.form_patch(chunk, conditioned, 4, ["a", "b", "c"])
    for call in (
        lambda given: kvp.form_patch(chunk, conditioned, 4, given),
        lambda given: kvp.apply_patch(chunk, patch, 0, given),
        lambda given: kvp.apply_patch(chunk, None, 0, given),
        lambda given: kvp.apply_patch(chunk, patch, 0, given, allow_stale=True),
        lambda given: kvp.apply_patch(chunk, patch, 0, ["a"], base=chunk.kv, base_antecedent=given),
        lambda given: kvp.accumulate(None, conditioned, chunk, given),
        lambda given: kvp.removal_patch(chunk, conditioned, chunk.kv, 4, given, ["a"]),
        lambda given: kvp.removal_patch(chunk, conditioned, chunk.kv, 4, ["a"], given),
        lambda given: kvp.correction_patch(chunk, patch, conditioned, 4, given),
        lambda given: PatchKey("B", "tiny", given),
    ):
        for given in ("abc", [chunk.kv], [1], 3):
            with pytest.raises(InputError, match=r"antecedent.*expected"):
                call(given)
    assert kvp.apply_patch(chunk, patch, 0, iter(["a", "b", "c"]))  # any sequence of names will do


# ----------------------------------------------------------------------------------------------------- fingerprints


def test_a_backbone_in_place_of_its_fingerprint_is_told(backbone, store, unchecked: None):
    chunk = chunk_of("gqa")
    fields = {name: getattr(chunk, name) for name in ("kv", "local", "span", "length", "id", "layout")}
    for call in (
        lambda given: chunk_id(given, RGB),
        lambda given: encoder_id(given, {"pixel_values": RGB}),
        lambda given: store.get("page", given),
        lambda given: store.contains("page", given),
        lambda given: store.delete("page", given),
        lambda given: store.put_encoder("page", given, np.ones((2, 3), np.float32)),
        lambda given: store.get_patches(PatchKey("page", given, ())),
        lambda given: Request("page", given),
        lambda given: Linker(given),
        lambda given: kvp.Chunk(**fields, backbone=given),
    ):
        for given in (backbone, ""):
            with pytest.raises(InputError, match=r"expected.*(fingerprint|str)"):
                call(given)

"""Items of a prompt: a str is a text or is refused, every form of an item has one id, and single items are no lists."""
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
from PIL import Image

import kvpatch_jax as kvp
from kvpatch_jax import Audio, Video
from kvpatch_jax.batch import BatchItem
from kvpatch_jax.batch.items import read_items
from kvpatch_jax.cache import expect_small, medium_of, one_form, sort_of
from kvpatch_jax.cache.inputs import looks_like_a_file
from kvpatch_jax.errors import InputError, KVPatchError
from kvpatch_jax.models import load
from kvpatch_jax.models.inputs.chat import read_messages
from kvpatch_jax.store import ChunkStore, DynamicLibrary, Linker, PatchKey, Request, StaticLibrary, chunk_id
from tests.goldens.redraw import draw_frames
from tests.shared.operator_cases import chunk_of, conditioned_of

PAGE = np.random.default_rng(5).integers(0, 256, (32, 48, 3), np.uint8)
"""An image that the small backbone takes."""
FRAMES = draw_frames("media", 4, 16, 24)


def id_of(item: object) -> str:
    return chunk_id("model", item)


def png_of(image: Image.Image, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


@pytest.fixture(scope="module")
def backbone():
    return load(Path(__file__).parents[2] / "evals" / "trained" / "documents" / "qwen2_5_vl", dtype="float32")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of the pixels PAGE."""
    Image.fromarray(PAGE).save(tmp_path / "page.png")
    return tmp_path / "page.png"


@pytest.fixture
def store(tmp_path: Path):
    with ChunkStore(tmp_path / "store") as store:
        yield store


FILES = r"""
nope.png|shot1.pgn|clip.mp4|SHOT.JPEG|a@2x.webp|bilder/größe.png|请看shot.png|notes.txt|my shot.png|describe shot.png
Screen Shot 2024-05-01 at 10.32.11 AM.png| shot.png |https://example.org/a|HTTP://x|s3://bucket/key|gs://b|file:/x
file:///x|example.com|data:image/png;base64,iVBO|data:video/mp4;base64,AA AA|/tmp/x|./x|../x|~/x|~user/x|C:\x|c:/x
\\host\x|/home/用户/截图|shots/run_1|shots/1|frames/|Qwen/Qwen2.5-VL
""".strip().replace("\n", "|")
TEXTS = r"""
What is in shot.png?|see https://example.org for more|https://example.org is down|Look at shot.png.|and/or|km/h|1/2|24/7
he/she/they|2024/05/01|12.5/100|和/或|I/O|image/png|The words of this line are more than any name has: shot.png|3.14
v1.2|U.S.|e.g.|w5 w6|...|wait...what|.|..|/|//|~|</think>|<im_end>|print(x.shape)|IMAGE#LOUVRE2025|\alpha|data:
file \(it|C:|你好
""".strip().replace("\n", "|")


def test_a_str_looks_like_a_file_or_is_a_text():
    texts = [*TEXTS.split("|"), "", "one\nshot.png", "a" * 5000, "x" * 5000 + ".png", "nul\0inside"]
    assert [text for text in texts if looks_like_a_file(text)] == []
    files = [*FILES.split("|"), " shot.png\n", "data:video/mp4;base64,AA\nAA", "data:image/png;base64," + "A" * 10_000]
    assert [text for text in files if not looks_like_a_file(text)] == []


@pytest.fixture(scope="module")
def calls(backbone, tmp_path_factory):
    """Every call that takes a str."""

    def batched(text: str, **place: object) -> None:
        (job,), _ = read_items([{"front": [text], "question": text, **place}], backbone.fingerprint, 8)
        if job.error is not None:
            raise job.error

    with ChunkStore(tmp_path_factory.mktemp("store")) as store, kvp.Session(backbone) as session:
        session.add([1, 2])
        library, dynamic = StaticLibrary(store, quota=1 << 20), DynamicLibrary(store)
        yield {
            "prepare": lambda text: backbone.prepare([text]),
            "make_chunk": lambda text: kvp.make_chunk(backbone, [text]),
            "lead": lambda text: kvp.make_chunk(backbone, [[1]], lead=[text]),
            "conditioned": lambda text: kvp.conditioned(backbone, [[[1]], [text]]),
            "chunk_id": id_of,
            "add": session.add,
            "recall": session.recall,
            "replace": lambda text: session.replace(session.ids[0], text),
            "ask": lambda text: session.ask(text, steps=1),
            "ask with several": lambda text: session.ask([text, [1]], steps=1),
            "front": lambda text: batched(text, question=[1]),
            "question": lambda text: batched(text, front=[]),
            "link": Linker(backbone.fingerprint, library).link,
            "static": lambda text: library.put("x", text),
            "dynamic": lambda text: dynamic.publish("x", text),
            "chat": lambda text: read_messages([{"role": "user", "content": text}]),
        }


def is_refused(call: Callable[[str], object], text: str) -> bool:
    """Whether a text is refused as ambiguous; that its words are not in the vocabulary does not matter here."""
    try:
        call(text)
    except InputError as error:
        return re.search(r"pathlib\.Path\(.*kvpatch_jax\.Text\(", str(error)) is not None
    except KVPatchError:
        pass
    return False


@pytest.mark.nightly
def test_what_looks_like_a_file_is_refused_by_every_call(calls, unchecked: None):
    for name, call in calls.items():
        assert [text for text in FILES.split("|") if not is_refused(call, text)] == [], name


@pytest.mark.nightly
@hypothesis.given(
    st.one_of(
        st.text("aZ9. /\\:~?\n-_é", max_size=12),
        st.builds("{}{}{}".format, st.text("ax9 ./"), st.sampled_from([".png", ".mp4", ".pgn", "?"]), st.text(" .?")),
        st.builds("{}{}".format, st.sampled_from(["https://", "see s3://", "data:image/png;", "~/"]), st.text("a /.")),
    )
)
def test_every_call_has_the_same_verdict(calls, text: str):
    verdicts = {name: is_refused(call, text) for name, call in calls.items()}
    assert set(verdicts.values()) == {looks_like_a_file(text)}, verdicts


def test_files_that_are_there_change_no_verdict(backbone, tmp_path, monkeypatch):
    """So that a batch, a prompt and a test mean the same on every machine."""
    monkeypatch.chdir(tmp_path)
    before = backbone.prepare(["C6"])["input_ids"]
    (tmp_path / "C6").write_text("")  # a word of the small backbone's vocabulary
    assert np.array_equal(before, backbone.prepare(["C6"])["input_ids"])


def test_a_text_may_look_like_a_file(store):
    """As a `Text`, as a library's entry of kind TEXT, between references of a prompt, and in a message's parts."""
    library = StaticLibrary(store, quota=1 << 20)
    for reference in (library.put("a", "x.png", kind="TEXT"), library.put("b", kvp.Text("x.png"))):
        resource = library.get(reference.kind, reference.name)
        assert resource is not None
        assert (reference.kind, resource.content) == ("TEXT", "x.png")
        assert resource.chunk_id("model") == id_of(kvp.Text("x.png"))
    library.put("X", [1, 2])
    with Linker("model", library).link("TOKENS#X as shot.png") as linked:
        assert linked.items == [[1, 2], " as shot.png"]
        assert isinstance(linked.items[1], kvp.Text)
    messages = [{"role": "assistant", "content": "shot.png"}]
    messages += [{"role": "user", "content": [{"type": "text", "text": "shot.png"}]}]
    assert read_messages(messages) == (messages, [])


def test_items_from_json_say_what_is_an_image(path):
    """The same ids as of a path and a `Text`; a str alone is refused, and the message says the way."""
    name = str(path)
    lines = [
        {"front": [{"image": name}, {"text": "a.png"}], "question": {"text": "b.png"}},
        {"front": [name], "question": "What?"},
        {"front": [{"image": 3}], "question": "What?"},
        {"front": [{"images": name}], "question": "What?"},
        {"front": [{"image": "https://example.org/a.png"}], "question": "What?"},
    ]
    jobs, _ = read_items(json.loads(json.dumps(lines)), "model", 8)
    by_hand = BatchItem([path, kvp.Text("a.png")], kvp.Text("b.png"))
    assert jobs[0].digest == read_items([by_hand], "model", 8)[0][0].digest
    for job, message in zip(
        jobs[1:],
        (
            'in JSON {"image": ...}, {"video": ...} or {"text": ...}',
            "item.front 0: got a int; expected 'image'",
            "item.front 0: got a part of type None with the fields ['images']",
            "expected a data URL (an address: fetch it first",
        ),
        strict=True,
    ):
        assert message in str(job.error)


def test_a_batch_of_nothing_but_names_of_files_is_refused_before_a_line_is_written(backbone, tmp_path):
    items = [{"front": [f"page {number}.png"], "question": "C6"} for number in range(3)]
    with pytest.raises(InputError, match=r"got 3 invalid items: .*page 0\.png.*in JSON"):
        kvp.answer_batch(backbone, None, items, out=tmp_path / "answers.jsonl")
    assert not (tmp_path / "answers.jsonl").exists()


def test_every_item_has_a_sort(backbone, unchecked: None):
    video, audio = Video(FRAMES, rate=1), Audio(np.zeros(3, np.float32), 16000)
    items = [Path("a/clip.MP4"), video, Path("said.wav"), audio, Path("page.png"), PAGE, FRAMES, "a text"]
    assert [sort_of(item) for item in items] == ["video"] * 2 + ["audio"] * 2 + ["image"] * 3 + ["text"]
    assert medium_of(video) is video
    assert medium_of(FRAMES) is None
    for ids in ([5, 9, 12], (5, 9, 12), np.array([5, 9, 12]), jnp.array([5, 9, 12])):
        assert backbone.prepare([ids])["input_ids"].tolist() == [[5, 9, 12]]
    for item in (5, 1.5, None, {"image": "page.png"}, b"no image", [1.5], [True]):
        with pytest.raises(InputError, match="expected text, token ids or an image"):
            backbone.prepare([item])


def test_an_image_has_one_id_however_it_is_given(path):
    image = Image.fromarray(PAGE)
    forms = [jnp.asarray(PAGE), image, path, path.read_bytes(), png_of(image, "TIFF"), image.convert("RGBA")]
    forms += [np.dstack([PAGE, np.full(PAGE.shape[:2], 255, np.uint8)]), PAGE.copy(order="F"), Image.open(path)]
    assert {id_of(form) for form in forms} == {id_of(PAGE)}
    grey = PAGE[..., 0]
    forms = [grey, grey[..., None], Image.fromarray(grey), np.dstack([grey] * 3), png_of(Image.fromarray(grey))]
    assert len({id_of(form) for form in forms}) == 1
    colours = Image.fromarray(PAGE).quantize(16)
    forms = [colours, colours.convert("RGB"), png_of(colours), np.array(colours.convert("RGB"))]
    assert len({id_of(form) for form in forms}) == 1


def test_other_content_has_another_id(tmp_path):
    changed = PAGE.copy()
    changed[3, 7, 1] ^= 1
    (tmp_path / "clip.mp4").write_bytes(b"one")
    samples = np.linspace(-1, 1, 50, dtype=np.float32)
    others = [PAGE, changed, PAGE[:, :, ::-1], PAGE.transpose(1, 0, 2), np.dstack([PAGE, PAGE[..., 0]]), FRAMES]
    others += [Video(FRAMES, rate=rate) for rate in (2, 4)] + [Video(FRAMES[:3], rate=2), Video(FRAMES[::-1], rate=2)]
    others += [Video(FRAMES, timestamps=[0, 0.5, 1, end]) for end in (1.5, 1.6)]
    others += [Video(FRAMES, rate=2, fps=1), Video(FRAMES, rate=2, frames=2)]
    others += [tmp_path / "clip.mp4", Video(b"one", fps=1), Video(b"two"), Audio(b"one"), b"one", samples]
    others += [Audio(samples, 16000), Audio(samples, 8000), Audio(samples[:-1], 16000)]
    # Bytes that only begin like an image are bytes.
    others += [b"BM", b"BMW is a car", b"\x89PNG", png_of(Image.fromarray(PAGE))[:100]]
    assert len({id_of(other) for other in others}) == len(others)


def test_a_medium_has_one_id_and_keeps_nothing_of_the_callers(tmp_path):
    path, samples = tmp_path / "clip.mkv", np.linspace(-1, 1, 50, dtype=np.float32)
    path.write_bytes(b"one")
    assert id_of(Video(FRAMES, rate=2)) == id_of(Video(FRAMES.copy(), rate=2.0)) == id_of(Video(list(FRAMES), rate=2))
    assert id_of(path) == id_of(Video(path)) == id_of(Video(b"one"))
    assert id_of(Audio(samples.astype(np.float64), 16000)) == id_of(Audio(samples, 16000))

    frames, copied = FRAMES.copy(), samples.copy()
    video, audio, clip = one_form(Video(frames, rate=2)), one_form(Audio(copied, 8000)), one_form(path)
    frames[:] = copied[:] = 0
    path.write_bytes(b"two")
    assert np.array_equal(video.source, FRAMES)
    assert np.array_equal(audio.source, samples)
    assert clip.source == b"one"
    path.unlink()
    Image.fromarray(FRAMES[0]).save(tmp_path / "b.png")
    Image.fromarray(FRAMES[1]).save(tmp_path / "a.png")
    assert np.array_equal(one_form(Video(tmp_path, timestamps=[0, 1])).source, FRAMES[[1, 0]])


def test_ids_come_from_the_content_and_a_path_is_an_image_in_every_place(backbone, store, path):
    """As a library and the linker name it, so that what was computed by hand is found by its reference."""
    made = lambda *items, **options: kvp.make_chunk(backbone, items, **options).id
    assert made(path) == made(PAGE) == made(Image.fromarray(PAGE)) == chunk_id(backbone.fingerprint, PAGE)
    assert made(PAGE) != made(PAGE[::-1].copy())
    assert made("C6") == chunk_id(backbone.fingerprint, "C6")
    assert made("C6", [13]) == chunk_id(backbone.fingerprint, "C6", [13])
    assert made(PAGE, id="page") == "page"

    by_path, by_pixels = (backbone.prepare([item]) for item in (path, PAGE))
    assert all(np.array_equal(by_path[name], by_pixels[name]) for name in by_pixels)
    library = StaticLibrary(store, quota=1 << 20)
    assert library.put("PAGE", path).kind == "IMAGE"
    resource = library.get("IMAGE", "PAGE")
    assert resource is not None
    assert resource.content == path.read_bytes()
    assert np.array_equal(resource.item, PAGE)
    with pytest.raises(InputError, match=r"gone\.png"):
        library.put("GONE", path.with_name("gone.png"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Video(FRAMES, rate=0), "video: rate: got 0; expected a positive number"),
        (lambda: Video(FRAMES, rate=1, frames=-1), "video: frames: got -1; expected a positive whole number"),
        (lambda: Video(FRAMES, rate=float("nan")), "video: rate: got nan"),
        (lambda: Video(FRAMES, rate=1, timestamps=[0, 1, 2, 3]), "both rate and timestamps"),
        (lambda: Video(FRAMES, rate=1, fps=1, frames=2), "both fps and frames"),
        (lambda: Video(FRAMES, timestamps=[0, 2, 1, 3]), "expected seconds that rise from 0 or more"),
        (lambda: Video(FRAMES, timestamps=[-1, 0, 1, 3]), "expected seconds that rise from 0 or more"),
        (lambda: Video(FRAMES, timestamps=[0, 1, 2, 10**400]), "expected seconds that rise from 0 or more"),
        (lambda: Video(FRAMES, timestamps=[0, 1]).read(), "got 4 frames of .* and 2 timestamps; expected"),
        (lambda: Video(FRAMES).read(), "frames with .*; expected rate or timestamps of frames"),
        (lambda: Video(b"file", rate=2).read(), "a file with .*; expected rate or timestamps of frames"),
        (lambda: Video(FRAMES[0], rate=2).read(), r"of shape \[16, 24, 3\]; expected"),
        (lambda: Video([FRAMES[0], FRAMES[0][:8]], rate=2).read(), "frames of sizes"),
        (lambda: Video([], rate=2).read(), "got a list; expected a file, a folder, images"),
        (lambda: Video(Path("missing.mp4")).read(), "no readable file"),
        (lambda: Audio(np.zeros((2, 2), np.float32), 8000), r"float32 \[2, 2\] and .*; expected .* floats \[samples\]"),
        (lambda: Audio(np.zeros(3, np.int16), 8000), "int16 .*; expected .* floats"),
        (lambda: Audio(np.zeros(3, np.float32)), "and rate None; expected .* floats .* with one"),
        (lambda: Audio(b"x", 8000), "got a bytes and rate 8000; expected a path or bytes without a rate"),
        (lambda: Audio("said.wav"), "got a str and rate None; expected a path"),
        (lambda: Audio(np.full(3, np.inf, np.float32), 8000).read(), "not finite"),
        (lambda: expect_small(Video(FRAMES, rate=1), 100), "got 4608 bytes; expected at most 100"),
        (lambda: expect_small(Video(b"12345"), 4), "got 5 bytes; expected at most 4"),
        (lambda: expect_small(Audio(Path("missing.wav")), 4), "no such file"),
    ],
)
def test_what_is_no_video_or_sound_is_refused(make, message, unchecked: None):
    with pytest.raises(InputError, match=message):
        make()


def test_a_single_item_is_no_sequence_of_items(backbone, unchecked: None):
    single = ("a b c", kvp.Text("a b c"), PAGE, jnp.asarray(PAGE), Path("page.png"), Image.fromarray(PAGE), 7)
    for call in (backbone.prepare, lambda items: kvp.make_chunk(backbone, items, "x")):
        for items in single:
            with pytest.raises(InputError, match="expected a sequence of items"):
                call(items)
    with pytest.raises(InputError, match="expected a sequence of items, at least one"):
        backbone.prepare([])
    assert backbone.prepare(item for item in [[1], [2]])["input_ids"].tolist() == [[1, 2]]


def test_a_bare_antecedent_is_refused_by_every_operator(unchecked: None):
    chunk = chunk_of("gqa")
    conditioned = conditioned_of(chunk)
    patch = kvp.form_patch(chunk, conditioned, 4, ["a", "b", "c"])
    for call in (
        lambda names: kvp.form_patch(chunk, conditioned, 4, names),
        lambda names: kvp.apply_patch(chunk, patch, 0, names),
        lambda names: kvp.apply_patch(chunk, None, 0, names),
        lambda names: kvp.apply_patch(chunk, patch, 0, names, allow_stale=True),
        lambda names: kvp.apply_patch(chunk, patch, 0, ["a"], base=chunk.kv, base_antecedent=names),
        lambda names: kvp.accumulate(None, conditioned, chunk, names),
        lambda names: kvp.removal_patch(chunk, conditioned, chunk.kv, 4, names, ["a"]),
        lambda names: kvp.removal_patch(chunk, conditioned, chunk.kv, 4, ["a"], names),
        lambda names: kvp.correction_patch(chunk, patch, conditioned, 4, names),
        lambda names: PatchKey("B", "tiny", names),
    ):
        for names in ("abc", [chunk.kv], [1], 3):
            with pytest.raises(InputError, match=r"antecedent.*expected"):
                call(names)
    assert kvp.apply_patch(chunk, patch, 0, iter(["a", "b", "c"]))  # any sequence of names will do


def test_a_backbone_in_place_of_its_fingerprint_is_refused(backbone, store, unchecked: None):
    chunk = chunk_of("gqa")
    fields = {name: getattr(chunk, name) for name in ("kv", "local", "span", "length", "id", "layout")}
    for call in (
        lambda backbone: chunk_id(backbone, PAGE),
        lambda backbone: store.get("page", backbone),
        lambda backbone: store.contains("page", backbone),
        lambda backbone: store.delete("page", backbone),
        lambda backbone: store.put_encoder("page", backbone, np.ones((2, 3), np.float32)),
        lambda backbone: store.get_patches(PatchKey("page", backbone, ())),
        lambda backbone: Request("page", backbone),
        Linker,
        lambda backbone: kvp.Chunk(**fields, backbone=backbone),
    ):
        for wrong in (backbone, ""):
            with pytest.raises(InputError, match=r"expected.*(fingerprint|str)"):
                call(wrong)

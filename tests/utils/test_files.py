"""Files that are replaced whole, and JSON of strangers."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvpatch_jax.errors import InputError
from kvpatch_jax.plan import DeviceCosts
from kvpatch_jax.utils import strict_json
from kvpatch_jax.utils.atomic_files import replace


def test_one_of_many_writers_wins_and_leaves_no_other_file(tmp_path: Path):
    path = tmp_path / "a[1]*.json"
    contents = [bytes([number]) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=replace, args=(path, content)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]


def test_the_temporary_file_of_a_killed_process_is_deleted_and_a_living_ones_stays(tmp_path: Path):
    path = tmp_path / "a[1].json"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = [f".{path.name}.{dead.pid}.0.new", f".{path.name}.1.0.new", f".b.json.{dead.pid}.0.new"]
    for name in names:
        (tmp_path / name).write_bytes(b"half")
    replace(path, b"content")
    assert path.read_bytes() == b"content"
    assert [(tmp_path / name).exists() for name in names] == [False, True, True]


def test_a_place_that_cannot_be_written_is_unchanged(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        replace(tmp_path / "folder", b"content")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]
    with pytest.raises(InputError, match="expected a file that can be written"):
        DeviceCosts.assumed().write(tmp_path / "nowhere" / "costs.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "there twice"),
        ('[{"a": {"b": 1, "b": 1}}]', "there twice"),
        ("NaN", "NaN is no number"),
        ("[-Infinity]", "-Infinity is no number"),
        ("[" * 100_000, "too deeply|Expecting"),
        ("", "Expecting"),
    ],
)
def test_json_with_repeated_names_or_infinities_is_refused(text: str, message: str):
    for content in (text, text.encode()):
        with pytest.raises(ValueError, match=message):
            strict_json.loads(content)
    assert strict_json.loads('{"a": [1, 2.5, null], "b": {"a": 1}}') == {"a": [1, 2.5, None], "b": {"a": 1}}

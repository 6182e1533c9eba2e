"""Files that are replaced whole, and JSON of strangers: what all who write and read small files share."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvpatch_jax.errors import PlanError
from kvpatch_jax.plan import DeviceCosts
from kvpatch_jax.utils import strict_json
from kvpatch_jax.utils.atomic_files import replace


def test_many_who_replace_one_file_leave_one_of_theirs_whole(tmp_path: Path):
    path = tmp_path / "a[1]*.json"
    contents = [bytes([number]) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=replace, args=(path, content)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_what_a_killed_process_left_is_swept_and_a_living_ones_stays(tmp_path: Path):
    path = tmp_path / "a[1].json"
    died = subprocess.Popen([sys.executable, "-c", ""])
    died.wait()
    left, own = tmp_path / f".{path.name}.{died.pid}.0.new", tmp_path / f".{path.name}.1.0.new"
    other = tmp_path / f".b.json.{died.pid}.0.new"
    for each in (left, own, other):
        each.write_bytes(b"half")
    replace(path, b"whole")
    assert path.read_bytes() == b"whole"
    assert (left.exists(), own.exists(), other.exists()) == (False, True, True)


def test_a_place_that_cannot_be_written_keeps_what_is_there(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        replace(tmp_path / "folder", b"content")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(PlanError, match="expected a file that can be written"):
        DeviceCosts.assumed().write(tmp_path / "nowhere" / "costs.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "a": 2}', "there twice"),
        ('[{"a": {"b": 1, "b": 1}}]', "there twice"),
        ("NaN", "NaN is no number"),
        ("[-Infinity]", "-Infinity is no number"),
        ("[" * 100_000, "too deeply|Expecting"),
        ("", "Expecting"),
    ],
)
def test_json_that_says_a_name_twice_or_no_number_is_none(text: str, said: str):
    for given in (text, text.encode()):
        with pytest.raises(ValueError, match=said):
            strict_json.loads(given)


def test_json_is_read_as_ever():
    assert strict_json.loads('{"a": [1, 2.5, null], "b": {"a": 1}}') == {"a": [1, 2.5, None], "b": {"a": 1}}

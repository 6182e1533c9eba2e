"""`python -m kvpatch_jax.store sizing`: what it prints, what it refuses, and that the guide's tables are its own."""

import json
import re
import shlex
from pathlib import Path

import pytest

from kvpatch_jax.store.cli.main import main
from kvpatch_jax.store.cli.sizing import curve_of
from kvpatch_jax.traces import Event, Trace

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs/guides/sizing.md"
CONFIG = {"num_hidden_layers": 2, "num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 64}
RATE = ("--chunks-per-day=86400", "--revisits=1m:0.5")


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return f"--config={tmp_path}"


def sized(capsys, *flags: str) -> list[dict]:
    assert main(["sizing", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_table_for_each_encoding_has_a_column_for_each_number_of_engines(config: str, capsys):
    flags = (config, *RATE, "--tokens=100", "--encoding=unreduced,k4v4", "--disk=1GB", "--engines=1,20")
    unreduced, packed = sized(capsys, *flags)
    assert unreduced["file"] == pytest.approx(100 * 2 * 2 * 2 * 64 * 2, abs=5000)
    assert packed["file"] < 0.4 * unreduced["file"]
    one, twenty = unreduced["fleets"]
    assert one["rate"] == 1
    assert one["hits"]["missed"] == pytest.approx(0.5)
    assert twenty["sent"] == pytest.approx(20 * one["sent"])
    assert one["residence"] is None or one["residence"] > 60
    assert main(["sizing", *flags]) == 0
    text = capsys.readouterr().out
    assert [line.split() for line in text.splitlines() if line.startswith("engines")] == [["engines", "1", "20"]] * 2
    assert text.count("\nhits: remote") == 2


def test_a_trace_brings_its_own_requests(config: str, tmp_path: Path, capsys):
    events: list[Event] = []
    for number in range(40):
        made = {"at": float(number), "session": f"s{number}", "op": "add", "chunk": "c", "content": f"{number % 4}"}
        events.append(Event.of({**made, "tokens": 50, "span": 50}))
    path = tmp_path / "t.jsonl"
    Trace(tuple(events)).write(path)
    (found,) = sized(capsys, config, f"--trace={path}", "--engines=1", "--noremote")
    assert found["tokens"] == 50
    assert found["fleets"][0]["hits"]["missed"] == pytest.approx(0.1)
    assert found["fleets"][0]["sent"] == 0
    (found,) = sized(capsys, config, f"--trace={path}", "--engines=1", "--chunks-per-day=864000")
    assert found["fleets"][0]["rate"] == pytest.approx(10)


def test_patches_are_put_and_read_with_their_chunk(config: str, capsys):
    (plain,) = sized(capsys, config, *RATE, "--engines=1")
    (patched,) = sized(capsys, config, *RATE, "--engines=1", "--patches=3", "--rank=8")
    assert patched["file"] > plain["file"] + 3 * 4096
    assert patched["fleets"][0]["remote_puts"] == pytest.approx(4 * plain["fleets"][0]["remote_puts"])
    assert patched["fleets"][0]["remote_lists"] == 1


def test_curves_are_read_strictly():
    curve = curve_of("90s:0.25, 1h:50%,2d:1")
    assert curve.seconds.tolist() == [90, 3600, 172800]
    assert curve.shares.tolist() == [0.25, 0.5, 1]


WRONG = {
    "no model": [],
    "no workload": ["CONFIG"],
    "no curve": ["CONFIG", "--chunks-per-day=5"],
    "a curve": ["CONFIG", "--chunks-per-day=5", "--revisits=soon"],
    "a curve that falls": ["CONFIG", "--chunks-per-day=5", "--revisits=1m:0.5,1h:0.4"],
    "no chunks": ["CONFIG", "--chunks-per-day=0", "--revisits=1m:0.5"],
    "engines": ["CONFIG", *RATE, "--engines=0"],
    "engines in words": ["CONFIG", *RATE, "--engines=ten"],
    "an encoding": ["CONFIG", *RATE, "--encoding=k3"],
    "a size": ["CONFIG", *RATE, "--disk=much"],
    "retention": ["CONFIG", *RATE, "--retention=week"],
    "stay": ["CONFIG", *RATE, "--stay=2"],
    "no file": ["--config=/nowhere/config.json", *RATE],
    "a trace": ["CONFIG", "--trace=/nowhere.jsonl"],
    "a word": ["CONFIG", *RATE, "more"],
    "a flag": ["CONFIG", *RATE, "--more"],
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_flags_are_one_line(config: str, capsys, what: str):
    assert main(["sizing", *(config if flag == "CONFIG" else flag for flag in WRONG[what])]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch("error: .+\n", printed.err)


def test_a_configuration_of_several_is_named(tmp_path: Path, capsys):
    file = tmp_path / "several.json"
    file.write_text(json.dumps({"one": {"config": CONFIG}, "two": 5}))
    assert sized(capsys, f"--config={file}#one", *RATE, "--engines=1")[0]["tokens"] == 1200
    for name in ("two", "three"):
        assert main(["sizing", f"--config={file}#{name}", *RATE]) == 2
        assert "error: --config" in capsys.readouterr().err


def test_the_guide_s_tables_are_what_its_commands_print(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    examples = re.findall(r"```sh\n((?:(?!```).)*)```\n\n```none\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    assert len(examples) == 3
    for command, shown in examples:
        words = shlex.split(command.replace("\\\n", " "))
        assert words[:4] == ["python", "-m", "kvpatch_jax.store", "sizing"]
        assert main(words[3:]) == 0
        assert capsys.readouterr().out == shown


def test_the_guide_s_code_runs():
    (block,) = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    space: dict = {}
    exec(compile(block, str(GUIDE), "exec"), space)
    assert space["one"].hits.missed == pytest.approx(2 / 3)
    assert space["fleet"].engines == 10

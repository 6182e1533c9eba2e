"""Reading straight into shardings over eight host devices, in a process of its own."""

import subprocess
from pathlib import Path

from store_cases import PYTHON, child_environment


def test_canonicals_are_read_into_shardings(tmp_path: Path):
    program = [PYTHON, str(Path(__file__).parent / "store_sharding.py"), str(tmp_path)]
    done = subprocess.run(program, env=child_environment(), capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["sharded", "8"], done.stderr[-2000:]

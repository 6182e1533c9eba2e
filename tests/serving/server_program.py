"""vLLM's own OpenAI server on the CPU rig: `python server_program.py serve MODEL …`, its flags those of `vllm`.

The engine's core is a process that is forked from the server's, so that what the rig replaces is replaced there too.
Every program that either compiles adds its seconds to the file KVPATCH_COMPILED, so that a client can tell whether it
measured compiling.
"""
# pyright: reportMissingImports=false

import ctypes
import os
import signal
from typing import Any

import cpu_rig

PR_SET_PDEATHSIG = 1


def count_compilations(path: str) -> None:
    """Appends a line to a file for every compilation, in this process and those forked from it: its seconds."""
    import jax

    def compiled(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            with open(path, "a") as file:
                file.write(f"{duration_secs}\n")

    jax.monitoring.register_event_duration_secs_listener(compiled)


def main() -> None:
    """Serves until it is told to stop."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # or it would outlive a client that is killed
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for /reset_prefix_cache
    cpu_rig.prepare()
    cpu_rig.install()
    count_compilations(os.environ["KVPATCH_COMPILED"])
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


if __name__ == "__main__":
    main()

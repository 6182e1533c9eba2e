"""Compiled programs: kept on disk for the next process, and announced while one takes long to compile.

`keep_compiled` is called where a model or session is opened, not on import: a program that imports the library and sets
`jax.config` itself is left alone.
"""

import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import re
import threading
from pathlib import Path

import jax
import jax.monitoring

logger = logging.getLogger(__name__)

CACHE = "KVPATCH_CACHE"
"""The environment's variable that names the library's cache folder; by default ~/.cache/kvpatch_jax."""
LARGEST = 1 << 30
"""Bytes of compiled programs on disk; those that were not read for longest leave."""
LEAST_SECONDS = 0.05
"""Seconds of compilation from which on a program is kept. Many small ones make a first answer slow; jax keeps those of
a second."""
PATIENCE = 2.0
"""Seconds of compilation after which it is announced."""

COMPILING = "/jax/core/compile/backend_compile_duration"
"""jax's event of a compilation: a scalar at its begin, a duration at its end, on the thread that compiles."""


def cache_folder() -> Path:
    """Returns the library's cache folder, which need not exist. Raises RuntimeError: a user without a home."""
    return Path(os.environ.get(CACHE) or Path.home() / ".cache" / "kvpatch_jax").expanduser()


def keep_compiled() -> None:
    """Keeps compiled programs in the cache folder, for other processes too, and announces long compilations.

    Idempotent. A folder that was chosen by JAX_COMPILATION_CACHE_DIR or `jax.config` stays, and with
    JAX_ENABLE_COMPILATION_CACHE=0 nothing is kept. Without a folder to write to, programs are compiled as ever.
    """
    _listen()
    config = jax.config
    if not config.jax_enable_compilation_cache:
        return

    if config.jax_compilation_cache_dir is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # A home may be missing or read-only.
        with contextlib.suppress(OSError, RuntimeError):
            folder = cache_folder() / "compiled" / _processor()
            # Whoever can write here can run code in this process.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                config.update("jax_compilation_cache_dir", str(folder))
                # Evicting takes a lock on a file, for which jax needs a package of its own.
                if _is_default("jax_compilation_cache_max_size", -1) and importlib.util.find_spec("filelock"):
                    config.update("jax_compilation_cache_max_size", LARGEST)
    if _is_default("jax_persistent_cache_min_compile_time_secs", 1.0):
        config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)


def describe_program(function: str, words: str) -> None:
    """Says what a program does, while it is traced: it is compiled next, on the same thread.

    Args:
      function: its name. words: such as "prefill of 1024 tokens", whose thousands are set apart.
    """
    words = re.sub(r"(?<=\d)(?=(\d{3})+\b)", " ", words)
    _local.words = {**getattr(_local, "words", {}), function: words}


def _is_default(option: str, default: int | float) -> bool:
    """Returns whether an option of jax is as jax ships it."""
    return option.upper() not in os.environ and getattr(jax.config, option) == default


def _processor() -> str:
    """Returns a name of this machine's processor: programs for CPUs use the instructions that it has, and a home may be
    shared by machines.
    """
    flags = b""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        flags = next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")
    return f"{platform.machine() or 'cpu'}-{hashlib.sha256(flags).hexdigest()[:8]}"


# ------------------------------------------------------------------------------------------------------ announcements

_local = threading.local()
"""Of each thread: `words` by function, and the `timers` of compilations under way, the innermost last."""
_announced = set[str]()


@functools.cache
def _listen() -> None:
    jax.monitoring.register_scalar_listener(_begin)
    jax.monitoring.register_event_duration_secs_listener(_end)


def _begin(event: str, value: int | float, **about: object) -> None:
    del value
    if event != COMPILING:
        return
    # The name is that of a jitted function: jit(prefill).
    name = str(about.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
    # Of a user's own programs nothing is said.
    words = getattr(_local, "words", {}).get(name)
    # It waits and runs nothing of jax, so the program may end meanwhile.
    timer = threading.Timer(PATIENCE, _announce, [words])
    timer.daemon = True
    _local.timers = [*getattr(_local, "timers", ()), timer]
    if words is not None and words not in _announced:
        # A process that ends starts no threads.
        with contextlib.suppress(RuntimeError):
            timer.start()


def _end(event: str, duration_secs: float, **about: object) -> None:
    del duration_secs, about
    if event == COMPILING and getattr(_local, "timers", None):
        _local.timers.pop().cancel()


def _announce(words: str) -> None:
    if words not in _announced:
        _announced.add(words)
        logger.warning("compiling %s …", words)

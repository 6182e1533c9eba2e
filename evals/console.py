"""What a program says while it works. Imports nothing that takes long, so that the first line stands there at once."""

import sys
import threading
import time
from collections.abc import Mapping

SECONDS = {"reorder": 2.0, "slide": 3.0, "recall": 4.0, "headline": 0.6}
"""What a step of a probe takes on two quiet cores, about, where it is not `STEP`; it only has to begin the estimate."""
STEP, SETTING_UP = 0.5, 12.0
TRUST = 0.1
"""How soon the pace that is met counts for more than the one expected: after this share of the work."""


def say_at_once(program: str, text: str) -> None:
    """Prints a line where `program` ("evals.run") is what was started, not imported, and not only asked for help."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    asks = any(word.lstrip("-").startswith("help") for word in sys.argv[1:])
    if spec is not None and spec.name == program and not asks:
        print(text, flush=True)


def quiet_backends(*, own: bool = False) -> None:
    """Keeps libraries' information off the terminal: backends that JAX looked for in vain, say. Warnings stay.

    --verbosity on the command line brings all of it back.

    Args:
      own: whether the program's own information stays, without the prefix of time and file.
    """
    import logging as standard

    from absl import flags, logging

    if flags.FLAGS["verbosity"].present:
        return

    standard.getLogger("jax").setLevel(standard.WARNING)
    if own:
        logging.get_absl_handler().setFormatter(None)  # pyright: ignore[reportArgumentType] # as absl documents it
    else:
        logging.set_verbosity(logging.WARNING)


def in_words(seconds: float) -> str:
    """Says a time as a person would: "50 s", "3 min", "1 h 20 min"."""
    if seconds < 90:
        return f"{5 * round(seconds / 5)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


class Progress:
    """One bar over all steps of all probes, with the time that is left: expected at first, then by the pace met.

    Steps may be counted by several threads.

    Args:
      steps: how many there are, by the probe's name. Names without an expectation of their own count as `STEP`.
      more: seconds expected of steps beside these, which are counted with seconds of their own.
    """

    def __init__(self, steps: Mapping[str, int], more: float = 0.0):
        from tqdm import tqdm

        self.expected = sum(count * SECONDS.get(name, STEP) for name, count in steps.items()) + SETTING_UP + more
        self.done, self.began, self.alone = 0.0, time.perf_counter(), threading.Lock()
        # A log gets a line now and then, not two a second.
        seldom = 0.5 if sys.stderr.isatty() else 20.0
        form = "{percentage:3.0f} %|{bar:24}| {desc}"
        self.bar = tqdm(total=self.expected, bar_format=form, mininterval=seldom, file=sys.stderr)
        self._show("setting up")
        self.bar.refresh()

    def __call__(self, name: str, work: int = 1, seconds: float | None = None) -> None:
        """Counts a step of `name` as done.

        Args:
          work: how many steps it stands for, where it has no expectation of its own.
          seconds: expected of it; by default what is expected of the name.
        """
        with self.alone:
            # The first step ends with all that was set up before it.
            setting_up = 0.0 if self.done else SETTING_UP
            own = SECONDS.get(name, STEP) if seconds is None else seconds
            self.done += setting_up + (work * STEP if work > 1 else own)
            self.bar.n = min(self.done, self.expected)
            self._show(name)

    def skip(self, work: int) -> None:
        """Takes steps that an earlier run has done out of what lies ahead."""
        self.expected -= work * STEP
        self.bar.total = self.expected

    def left(self) -> float:
        """Estimates the seconds that are left: the pace met so far, mixed with the expected one while that is young."""
        doubt = TRUST * self.expected
        pace = (time.perf_counter() - self.began + doubt) / (self.done + doubt)
        return max(0.0, self.expected - self.done) * pace

    def close(self) -> None:
        """Ends the bar."""
        self.bar.close()

    def _show(self, name: str) -> None:
        self.bar.set_description_str(f"about {in_words(self.left())} left · {name[:32].ljust(32)}", refresh=False)
        self.bar.update(0)

"""Finished probes of the window's suite on disk, so that a run goes on where it was stopped."""

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax.errors import InputError

from ...harness.parts import make_out
from ..results_table import ProbeItems, ResultsTable

VERSION = 2
"""Of what the probes measure: raised where an arm, a question or a number changes, so that old parts are refused."""
FOLDER = "window_parts"


class ProbeParts:
    """The finished probes in a folder; None for a run that keeps nothing.

    Args:
      folder: is made; parts lie in its `FOLDER`.
      config: what the parts depend on, JSON; `VERSION` is added.

    Raises:
      InputError: `folder` is a file, or holds parts of another configuration or version.
    """

    def __init__(self, folder: Path | None, config: Mapping[str, Any]):
        self.folder = None if folder is None else folder / FOLDER
        if self.folder is None:
            return

        make_out(self.folder)
        wanted = json.loads(json.dumps({"version": VERSION, **config}))
        about = self.folder / "config.json"
        if not about.exists():
            new = about.with_suffix(".new")
            new.write_text(json.dumps(wanted, indent=1) + "\n")
            os.replace(new, about)
            return

        try:
            found = json.loads(about.read_bytes())
        except ValueError as error:
            raise InputError(
                f"--out: got {about}, which is not whole ({error}); expected a whole file: choose another folder, or "
                f"delete {self.folder}"
            ) from error

        if not isinstance(found, dict):
            found = {}
        if found != wanted:
            apart = [key for key in {**wanted, **found} if found.get(key) != wanted.get(key)]
            said = ", ".join(f"{key} {found.get(key)!r} (now {wanted.get(key)!r})" for key in apart)
            raise InputError(
                f"--out: got {self.folder}, which holds parts of another run: {said}; expected this run's: choose "
                "another folder, or delete it"
            )

    def has(self, name: str) -> bool:
        """Returns whether a part was finished."""
        return self.folder is not None and self._file(name).exists()

    def keep(self, name: str, table: ResultsTable) -> None:
        """Writes a part: whole, or not at all."""
        if self.folder is None:
            return
        file = self._file(name)
        # Written beside it and renamed: a run that is stopped leaves no half of a part.
        new = file.with_suffix(".new")
        with new.open("wb") as stream:
            np.savez_compressed(stream, **_arrays(table))
        os.replace(new, file)

    def read(self, name: str, model: str) -> ResultsTable:
        """Reads a part that `has` knows of.

        Raises:
          InputError: the file is not one that `keep` wrote.
        """
        file = self._file(name)
        try:
            with np.load(file, allow_pickle=False) as arrays:
                return _part(arrays, model)
        except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(
                f"--out: got {file}, which is not a whole part ({error!r}); expected a whole one: delete it, and it is "
                "measured again"
            ) from error

    def _file(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name}.npz"


def _arrays(table: ResultsTable) -> dict[str, Any]:
    """Writes a part as named arrays, of which "about" (JSON) says what they are."""
    arrays: dict[str, Any] = {}
    probes, samples = [], []
    for number, ((probe, name), items) in enumerate(table.probes.items()):
        arms = list(items.predicted)
        probes.append([probe, name, items.reference, items.blind, list(items.kinds), arms])
        for column in items.asked:
            arrays[f"{column}.{number}"] = items.column(column)
        answers = [items.arm(arm) for arm in arms]
        arrays[f"predicted.{number}"] = np.stack([predicted for predicted, _ in answers])
        arrays[f"divergence.{number}"] = np.stack([divergence for _, divergence in answers])

    for number, (name, batches) in enumerate(table.samples.items()):
        samples.append(name)
        for column, values in zip(("value", "of"), zip(*batches, strict=True), strict=True):
            arrays[f"{column}.{number}"] = np.concatenate(values)

    about = {"probes": probes, "samples": samples}
    return {"about": np.array(json.dumps(about)), **arrays}


def _part(arrays: Mapping[str, np.ndarray], model: str) -> ResultsTable:
    about = json.loads(str(arrays["about"]))
    table = ResultsTable(model)
    for number, (probe, name, reference, blind, kinds, arms) in enumerate(about["probes"]):
        items = ProbeItems(probe, reference, blind)
        items.kinds = tuple(kinds)
        for column, batches in items.asked.items():
            batches.append(arrays[f"{column}.{number}"])
        predicted, divergence = (arrays[f"{column}.{number}"] for column in ("predicted", "divergence"))
        items.predicted = {arm: [row] for arm, row in zip(arms, predicted, strict=True)}
        items.divergence = {arm: [row] for arm, row in zip(arms, divergence, strict=True)}
        table.probes[probe, name] = items

    for number, (probe, arm, metric) in enumerate(about["samples"]):
        table.sample(probe, arm, metric, arrays[f"value.{number}"], arrays[f"of.{number}"])
    return table

"""Typed errors. Messages name the offending value and what was expected.

All of them are `ValueError`s, and all except those of the kernels derive from `KVPatchError`. `ReuseWarning` is none.
"""

from pallas_kernels.errors import KernelError as KernelError
from pallas_kernels.errors import KernelUnavailableError as KernelUnavailableError


class KVPatchError(ValueError):
    """Base of all errors that the library raises on bad input."""


class InputError(KVPatchError):
    """An argument, item, file or trace that is not what was expected; a rank or a goal that cannot be had."""


class LayoutError(KVPatchError):
    """A layout, channel or rope that is inconsistent, or KV of other channels or in another frame than expected."""


class ShapeError(KVPatchError):
    """An array whose shape or dtype does not match its layout, chunk or positions."""


class NotFiniteError(KVPatchError):
    """NaN or infinity in a canonical, a conditioned KV or a patch."""


class StalePatchError(KVPatchError):
    """A patch applied after another antecedent than the one it was formed after."""


class PatchMismatchError(KVPatchError):
    """A patch whose chunk, content, base, layout or backbone differs from that of its target."""


class WorseThanBlindError(KVPatchError):
    """A patch that, by its readout error, would lose more than reuse without it."""


class WeightsError(KVPatchError):
    """Missing, misshapen or unknown weights of a backbone, or weights that a store's chunks were not computed with."""


class ConfigError(KVPatchError):
    """A configuration with a missing, unknown or contradictory entry, or a checkpoint that cannot be found."""


class MissingExtraError(KVPatchError):
    """An optional package that is not installed; the message names the extra that installs it."""


class PoolError(KVPatchError):
    """A pool that is full or was donated, room that was not free in time, or slots that the pool does not have.

    Attributes:
      lost: whether the pool's contents were lost in a failed launch. `Executor.renew` and `Session.reprefill` make them
        again.
    """

    def __init__(self, message: str, *, lost: bool = False):
        super().__init__(message)
        self.lost = lost


class SessionError(KVPatchError):
    """What a window, a session or a batch cannot do: an unknown chunk, the pinned lead, a name for two contents, a
    session that is closed, …. It is unchanged.
    """


class StoreError(KVPatchError):
    """A store that is full, closed, busy, read-only, of another key, or whose file system fails. Nothing was changed.

    A missing or damaged object raises no error: it is a miss.
    """


class StoreCorruptError(StoreError):
    """Bytes that are no intact object, snapshot or index of a store.

    Attributes:
      other_format: whether they are of another version of the format, and therefore kept.
      bad: of a snapshot, a line for each object that failed verification.
    """

    def __init__(self, message: str, bad: tuple[str, ...] = (), *, other_format: bool = False):
        super().__init__(message)
        self.bad, self.other_format = bad, other_format


class StoreUnreachableError(StoreError):
    """A remote store that did not answer in time or failed temporarily, or was not contacted (`asked` is False)."""

    def __init__(self, message: str, asked: bool = True):
        super().__init__(message)
        self.asked = asked


class ReuseWarning(UserWarning):
    """Approximate reuse that audits found to lose too much, or patches that could not be formed or stored."""

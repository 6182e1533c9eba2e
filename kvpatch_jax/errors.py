"""Typed errors. Each message names the offending value and what was expected.

All of them are `ValueError`s, and all but the kernels' own derive from `KVPatchError`.
"""

from pallas_kernels.errors import KernelDtypeError as KernelDtypeError
from pallas_kernels.errors import KernelError as KernelError
from pallas_kernels.errors import KernelShapeError as KernelShapeError
from pallas_kernels.errors import KernelSlotError as KernelSlotError
from pallas_kernels.errors import KernelUnavailableError as KernelUnavailableError


class KVPatchError(ValueError):
    """Base of everything the library raises on bad input."""


class LayoutError(KVPatchError):
    """A layout, channel or rope that contradicts itself, or a kv pytree with other channels than its layout."""


class ShapeError(KVPatchError):
    """An array of another shape than its layout, chunk or positions ask for."""


class DtypeError(KVPatchError):
    """An array of another dtype than expected."""


class RankError(KVPatchError):
    """A rank below 1, beyond what a patch has, or one for each of channels that share a factor."""


class PositionError(KVPatchError):
    """A start, position or span that is out of range, or of a shape that the rope does not take."""


class FrameError(KVPatchError):
    """KV in another frame than expected: phase-free where the engine frame belongs, or the other way round."""


class RopeRegimeError(KVPatchError):
    """A rope whose frequencies depend on the sequence length, used outside the one regime it was pinned to."""


class NotFiniteError(KVPatchError):
    """NaN or infinity in a canonical, a conditioned KV or a patch."""


class StalePatchError(KVPatchError):
    """A patch asked to serve another antecedent than the one it was formed behind."""


class PatchMismatchError(KVPatchError):
    """A patch of another chunk, content, base, layout, backbone, frame or start than the one it is applied to."""


class WeightsError(KVPatchError):
    """Missing, mis-shaped or unknown weights of a backbone; or others than a store's chunks were made by."""


class ImageError(KVPatchError):
    """An image that cannot be read or does not fit the backbone."""


class ConfigError(KVPatchError):
    """A configuration with a missing, unknown or contradictory entry."""


class PoolError(KVPatchError):
    """A pool without room, or donated; slots that it does not hold, that are shared or that no page table expresses."""


class PoolLostError(PoolError):
    """A launch that was given the pool failed, and what lay there is gone; `PagedExecutor.renew` starts another one."""


class WindowError(KVPatchError):
    """A change that a window does not take: an unknown or repeated chunk, the pinned lead, a fork joined twice, ….

    Also a window that was saved for another backbone or store, or that is no window. The window is as it was.
    """


class SessionError(KVPatchError):
    """What a session does not do: an unknown chunk, one name for two contents, a file that holds no session, ….

    The session is as it was.
    """


class SessionClosedError(SessionError):
    """A session, or an answer of it, used after `close`."""


class CertificateError(KVPatchError):
    """A certificate of reuse that is damaged, of other weights or another version, or says what none can say."""


class SessionBusyError(SessionError, PoolError):
    """Others held the pool, or the places in the line, for as long as a session was willing to wait."""


class PlanError(KVPatchError):
    """A goal that no plan meets, a stale patch or a missing certificate in its way; or costs that cannot be read."""


class MissingExtraError(KVPatchError):
    """An optional package that is not installed; the message names the extra that brings it."""


class InputError(KVPatchError):
    """Any other bad input."""


class AmbiguousTextError(InputError):
    """A str that looks like a file's name or an address where a text or an image may be meant; see `Text`."""


class TraceError(KVPatchError):
    """A trace, or a line of one, that is not what this version writes: damage, another version, an impossible event."""


class StoreError(KVPatchError):
    """Base of what the chunk store raises. A missing or damaged object raises nothing: it is a miss."""


class StoreCorruptError(StoreError):
    """Bytes that are not a whole, unchanged object of the store. Raised to a caller only in the middle of a stream."""


class StoreVersionError(StoreError):
    """What a later version of the library wrote, and this one cannot read. It is left as it is; an object is a miss."""


class StoreFullError(StoreError):
    """No room: a budget that eviction cannot meet, or a file system without space."""


class StoreReadOnlyError(StoreError):
    """A store whose directory may not be written."""


class StoreIOError(StoreError):
    """Any other failure of the file system. What was being put is not acknowledged."""


class StoreUnreachableError(StoreIOError):
    """The remote store did not answer in time, or failed in a way that may pass, or was not asked (`asked`)."""

    def __init__(self, message: str, asked: bool = True):
        super().__init__(message)
        self.asked = asked


class StoreKeyError(StoreError):
    """Encrypted objects without their key, or with another. They are left as they are."""


class StoreSnapshotError(StoreError):
    """A snapshot or export of the store that cannot be taken over: unfinished, damaged, or of another secret.

    `bad` holds a line for each object that did not verify.
    """

    def __init__(self, message: str, bad: tuple[str, ...] = ()):
        super().__init__(message)
        self.bad = bad


class StorePlatformError(StoreError, AttributeError):
    """A system without what the store stands on: file locks as POSIX has them (`fcntl`).

    Also an AttributeError, for `kvpatch_jax` has no store there: `hasattr` says so and `help` leaves it out.
    """


class StoreClosedError(StoreError):
    """A store used after `close`."""


class LibraryFullError(StoreFullError):
    """A library whose quota an entry would exceed. The library is as it was."""


class UnknownReferenceError(StoreError):
    """A reference in a prompt that no library of this tenant's resolves. Names near ones of this tenant only."""


class FetchError(StoreError):
    """A chunk that was neither loaded nor computed; the cause is what went wrong while computing."""

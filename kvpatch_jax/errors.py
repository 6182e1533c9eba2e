"""Typed errors. Messages name the offending value and what was expected.

All of them are `ValueError`s, and all except those of the kernels derive from `KVPatchError`.
"""

from pallas_kernels.errors import KernelDtypeError as KernelDtypeError
from pallas_kernels.errors import KernelError as KernelError
from pallas_kernels.errors import KernelShapeError as KernelShapeError
from pallas_kernels.errors import KernelSlotError as KernelSlotError
from pallas_kernels.errors import KernelUnavailableError as KernelUnavailableError


class KVPatchError(ValueError):
    """Base of all errors that the library raises on bad input."""


class LayoutError(KVPatchError):
    """A layout, channel or rope that is inconsistent, or a kv pytree whose channels differ from its layout's."""


class ShapeError(KVPatchError):
    """An array whose shape does not match its layout, chunk or positions."""


class DtypeError(KVPatchError):
    """An array of an unexpected dtype."""


class RankError(KVPatchError):
    """A rank below 1 or above a patch's, or several ranks for channels that share a factor."""


class FrameError(KVPatchError):
    """KV in an unexpected frame, such as phase-free KV in place of engine-frame KV."""


class NotFiniteError(KVPatchError):
    """NaN or infinity in a canonical, a conditioned KV or a patch."""


class StalePatchError(KVPatchError):
    """A patch applied after another antecedent than the one it was formed after."""


class PatchMismatchError(KVPatchError):
    """A patch whose chunk, content, base, layout, backbone, frame or start differs from that of its target."""


class WeightsError(KVPatchError):
    """Missing, misshapen or unknown weights of a backbone, or weights that a store's chunks were not computed with."""


class ImageError(KVPatchError):
    """An image that cannot be read, or that the backbone does not accept."""


class ConfigError(KVPatchError):
    """A configuration with a missing, unknown or contradictory entry."""


class HubError(ConfigError):
    """A repository of the Hugging Face hub that is not there, not accessible or not reached, and not cached whole."""


class PoolError(KVPatchError):
    """A pool that is full or was donated; slots that are outside, shared or not expressible in page tables."""


class PoolLostError(PoolError):
    """A failed launch that the pool was donated to; its contents are lost. `Executor.renew` makes another."""


class WindowError(KVPatchError):
    """An invalid change of a window: an unknown or repeated chunk, the pinned lead, ….

    Also a saved window of another backbone, or an invalid one. The window is unchanged.
    """


class SessionError(KVPatchError):
    """An invalid operation on a session: an unknown chunk, one name for two contents, a file without a session, ….

    The session is unchanged.
    """


class SessionClosedError(SessionError):
    """A session, or one of its answers, used after `close`."""


class CertificateError(KVPatchError):
    """A certificate of reuse that is damaged, inconsistent, or of other weights or another version."""


class SessionBusyError(SessionError, PoolError):
    """Other sessions held the pool, or filled the queue for it, until the timeout."""


class PlanError(KVPatchError):
    """A goal that no plan meets, because of a stale patch or a missing certificate, for example; or invalid costs."""


class MissingExtraError(KVPatchError):
    """An optional package that is not installed; the message names the extra that installs it."""


class InputError(KVPatchError):
    """Any other bad input."""


class AmbiguousTextError(InputError):
    """A str that looks like a file's name or an address where a text or an image may be meant; see `Text`."""


class ShardError(KVPatchError):
    """Shards of a batch that failed on a cluster."""


class TraceError(KVPatchError):
    """An invalid trace or line of a trace: damaged, of another version, or with an impossible event."""


class StoreError(KVPatchError):
    """Base of the chunk store's errors. A missing or damaged object raises no error: it is a miss."""


class StoreCorruptError(StoreError):
    """Bytes that are not an intact object of the store. Raised to callers only in the middle of a stream."""


class StoreVersionError(StoreError):
    """An object of another version of the format. It is kept, and a miss."""


class StoreFullError(StoreError):
    """A budget that eviction cannot meet, or a file system without space."""


class StoreReadOnlyError(StoreError):
    """A store whose directory may not be written."""


class StoreIOError(StoreError):
    """Any other failure of the file system. A put that fails is not acknowledged."""


class StoreBusyError(StoreIOError):
    """Another process holds a lock for too long; the message names it. Nothing was changed."""


class StoreUnreachableError(StoreIOError):
    """A remote store that did not answer in time or failed temporarily, or was not contacted (`asked` is False)."""

    def __init__(self, message: str, asked: bool = True):
        super().__init__(message)
        self.asked = asked


class StoreKeyError(StoreError):
    """Encrypted objects whose key is missing or wrong. They are kept unchanged."""


class StoreSnapshotError(StoreError):
    """A snapshot or export of the store that cannot be imported: unfinished, damaged, or of another secret.

    `bad` has one line per object that failed verification.
    """

    def __init__(self, message: str, bad: tuple[str, ...] = ()):
        super().__init__(message)
        self.bad = bad


class StorePlatformError(StoreError, AttributeError):
    """A system without POSIX file locks (`fcntl`), which the store requires.

    Also an AttributeError, because `kvpatch_jax` has no store on such a system: `hasattr` returns False, and `help`
    omits it.
    """


class StoreClosedError(StoreError):
    """A store used after `close`."""


class LibraryFullError(StoreFullError):
    """A library whose quota an entry would exceed. The library is unchanged."""


class UnknownReferenceError(StoreError):
    """A reference in a prompt that no library of this tenant resolves. Suggests only similar names of this tenant."""


class FetchError(StoreError):
    """A chunk that could neither be loaded nor computed; the cause is the error of computing it."""

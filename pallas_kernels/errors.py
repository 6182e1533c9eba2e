"""What the kernels refuse, and why. `kvpatch_jax.errors` re-exports these."""


class KernelError(ValueError):
    """Base of everything `pallas_kernels` raises."""


class KernelUnavailableError(KernelError):
    """The implementation asked for does not exist, or cannot run here."""


class KernelShapeError(KernelError):
    """Arrays whose shapes do not fit each other, a layout word that is not known, or a rank out of range."""


class KernelDtypeError(KernelError):
    """An array of another dtype than expected."""


class KernelSlotError(KernelError):
    """Slots that are out of range or named twice."""

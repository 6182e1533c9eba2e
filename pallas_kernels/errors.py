"""What the kernels refuse, and why. `kvpatch_jax.errors` re-exports these."""


class KernelError(ValueError):
    """Arrays, slots, a rank or a layout's word that a kernel does not take."""


class KernelUnavailableError(KernelError):
    """The implementation asked for does not exist, or cannot run here."""

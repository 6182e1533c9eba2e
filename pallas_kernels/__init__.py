"""Kernels on plain arrays; one folder per operation. They know no layout, rope or chunk."""

from ._dispatch import Case as Case
from ._dispatch import candidates as candidates
from ._dispatch import preferring as preferring
from ._operands import Codes as Codes
from ._target import targeting as targeting
from .block_product import block_product as block_product
from .errors import KernelError as KernelError
from .errors import KernelUnavailableError as KernelUnavailableError
from .factorise import factorise as factorise
from .rotate_patch import rotate_patch as rotate_patch
from .splice import splice as splice

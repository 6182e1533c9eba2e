"""rotate_patch, writing into a paged pool in place."""

from .._operands import padded_width as padded_width
from .api import check_slots as check_slots
from .api import splice as splice

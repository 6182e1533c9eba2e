"""Shared by the tests of the evaluation."""

from tests.kvpatch_jax.conftest import unchecked as unchecked

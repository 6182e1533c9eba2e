"""A tenant's deletion beside puts of other stores: each put is before it, and gone in every tier, or after it."""

from pathlib import Path
from typing import Any

import pytest
from store_cases import BACKBONE, chunk_of

from kvpatch_jax.store import Budget, ChunkStore, open_remote, tenants


@pytest.mark.parametrize("puts", [1, 3])
def test_what_is_put_before_a_tenant_s_directory_is_gone_comes_back_from_no_tier(tmp_path: Path, monkeypatch, puts):
    """Another store puts it when the tombstone is written already, and the remote store has been emptied."""
    rename_away, renames = tenants._rename_away, []
    remote = lambda: open_remote(f"file://{tmp_path}/remote")
    options: dict[str, Any] = {"budget": Budget(host=0)}

    with ChunkStore(tmp_path / "root", remote=remote(), **options) as other:

        def renaming(disk, space, tenant):
            if space.startswith("obj/"):
                renames.append(space)
                if len(renames) <= puts:
                    other.put(chunk_of("late", len(renames)))
                    other.flush()
            return rename_away(disk, space, tenant)

        monkeypatch.setattr(tenants, "_rename_away", renaming)
        with ChunkStore(tmp_path / "root", remote=remote(), **options) as store:
            store.put(chunk_of("early"))
            tenants.delete_tenant(store.disk, store.names)
            assert len(renames) == puts + 1, "once more after each directory with something later in it"
        monkeypatch.undo()
        for id in ("late", "early"):
            assert other.get(id, BACKBONE) is None
        other.put(chunk_of("after"))
        assert other.get("after", BACKBONE) is not None

    with ChunkStore(tmp_path / "root", remote=remote(), **options) as store:
        assert store.get("late", BACKBONE) is None, "the remote store still has it"
        assert store.get("after", BACKBONE) is not None

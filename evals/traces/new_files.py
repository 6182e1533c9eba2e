"""Files of traces, which overwrite nothing."""

from pathlib import Path

from kvpatch_jax.errors import InputError


def write_file(path: Path, content: bytes) -> Path:
    """Writes a file that is not there; one with the same bytes stays.

    Raises:
      InputError: there is another file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError as error:
        if not path.is_file() or path.read_bytes() != content:
            raise InputError(f"trace: got {str(path)!r:.300}, which is there; expected a new file") from error
    return path

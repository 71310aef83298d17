"""A folder with a Parquet file for each row of a sweep or a search, written whole or not at all."""

import io
import json
import pathlib
from typing import Any

from .._files import read_file, shown, written_whole


_ABOUT = "sweep.json"
# The largest sizes, in bytes, of the file about the sweep and of the file of a row.
_MOST_ABOUT, _MOST_PART = 2**16, 2**24

Row = dict[str, Any]


def open_parts(folder: pathlib.Path, digest: str, what: str = "sweep") -> dict[int, Row]:
    """The rows that a folder holds, by their numbers. The folder is created if it does not exist.

    **Arguments:**

    - `digest`: the digest of what the rows belong to.
    - `what`: what that is, for messages.

    **Raises:**

    `ValueError` for a folder that holds something else, or a damaged row.
    """
    import polars as pl

    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`{shown(folder)}` is a file; give a folder for the rows of the {what}.")
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / _ABOUT
    if not note.exists():
        others = any(not file.name.startswith(".") for file in folder.iterdir())
        if others and not note.exists():  # Of the same sweep, which may have begun meanwhile.
            raise ValueError(
                f"`{shown(folder)}` is not empty and holds no {what}; give another folder."
            )
        with written_whole(note, first=True) as partial:
            partial.write_text(json.dumps({"digest": digest}))
    try:
        same = json.loads(read_file(note, _MOST_ABOUT))["digest"] == digest
    except (ValueError, KeyError, TypeError, RecursionError):
        same = False
    if not same:
        raise ValueError(
            f"`{shown(folder)}` holds another {what} (other values, samples, seed or job); give "
            f"another folder, or continue the same {what}."
        )
    for partial in folder.glob(".part-*.partial"):  # Of sweeps that were killed.
        partial.unlink(missing_ok=True)
    done = {}
    for path in sorted(folder.glob("part-*.parquet")):
        content = io.BytesIO(read_file(path, _MOST_PART))  # No part of its name is a pattern.
        try:
            done |= {row["row"]: row for row in pl.read_parquet(content).to_dicts()}
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, KeyError):
            raise ValueError(
                f"`{shown(path)}` is damaged; remove it, and the same {what} simulates its row "
                "again."
            ) from None
    return done


def write_part(folder: pathlib.Path, row: Row) -> None:
    """Writes a row. Other processes may write the same row at the same time.

    **Raises:**

    `OSError` if it cannot be written, such as to a full disk.
    """
    import polars as pl

    content = io.BytesIO()
    pl.DataFrame([row]).write_parquet(content)
    for last in (False, True):
        try:
            with written_whole(folder / f"part-{row['row']:06d}.parquet") as partial:
                partial.write_bytes(content.getbuffer())
            return
        except FileNotFoundError:  # Another sweep has just tidied up.
            if last or not folder.is_dir():
                raise

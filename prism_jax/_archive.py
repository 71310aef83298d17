"""Files with arrays and a description in JSON: one `.npz`, without pickle."""

import io
import json
import os
import zipfile
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from ._files import read_file, shown, written_whole


_ABOUT = "about"
# Of the file, and of all that it holds: what is small as a file need not be so in memory.
_MOST_BYTES = 2**28

_T = TypeVar("_T")


def write_archive(
    path: str | os.PathLike[str], about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Writes a file, whole or not at all."""
    everything: dict[str, Any] = {**arrays, _ABOUT: np.array(json.dumps(about))}
    with written_whole(path) as partial, open(partial, "wb") as file:
        np.savez_compressed(file, **everything)


def read_archive(
    path: str | os.PathLike[str], about_type: type[_T], what: str, writer: str
) -> tuple[_T, dict[str, np.ndarray]]:
    """Reads the description, converted, and the arrays.

    **Arguments:**

    - `about_type`: the type of the description.
    - `what`, `writer`: what the file should hold, and the function that writes such files, for
        messages.

    **Raises:**

    `ValueError` of one sentence if the file is damaged or of another kind; `OSError` if it cannot
    be read.
    """
    content = read_file(path, _MOST_BYTES)
    try:
        arrays = _arrays(content)
        about = json.loads(str(arrays.pop(_ABOUT)))
        return msgspec.convert(about, about_type), arrays
    except Exception as error:  # Damaged archives raise almost anything.
        raise damaged(path, what, writer) from error


def damaged(path: str | os.PathLike[str], what: str, writer: str) -> ValueError:
    """The error for a file that is damaged or of another kind."""
    return ValueError(
        f"`{shown(path)}` is not a {what} that this version saved; give a file that `{writer}` "
        "wrote."
    )


def _arrays(content: bytes) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(io.BytesIO(content)) as members:
        if sum(member.file_size for member in members.infolist()) > _MOST_BYTES:
            raise ValueError
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return dict(archive)

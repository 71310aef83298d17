"""A file of arrays beside a description in JSON: one `.npz`, without pickle."""

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np


_ABOUT = "about"


def write_archive(
    path: str | os.PathLike, about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Writes a file, which appears whole or not at all."""
    partial = f"{os.fspath(path)}.partial"
    everything: dict[str, Any] = {**arrays, _ABOUT: np.array(json.dumps(about))}
    with open(partial, "wb") as file:
        np.savez_compressed(file, **everything)
    os.replace(partial, path)


def read_archive(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The description and the arrays.

    **Raises:**

    `OSError` if the file cannot be read, and almost anything if it is damaged.
    """
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
        arrays = dict(archive)
    about = json.loads(str(arrays.pop(_ABOUT)))
    if not isinstance(about, dict):
        raise ValueError
    return about, arrays

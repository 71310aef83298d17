"""Reads files by their literal names, and writes files whole or not at all; among them archives of
arrays and a description in JSON: one `.npz`, without pickle.
"""

import contextlib
import errno
import importlib.resources
import io
import json
import os
import pathlib
import secrets
import stat
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from ._misc import check_type, quoted


Path = str | os.PathLike[str]

_MOST_OF_A_PATH = 240
# The description in an archive.
_ABOUT = "about"
# Of an archive, and of all that it holds: what is small as a file need not be so in memory.
_MOST_BYTES = 2**28

_T = TypeVar("_T")


def resource(name: str) -> str:
    """The text of a file of this package, such as `report/_page.css`."""
    return importlib.resources.files("prism_jax").joinpath(name).read_text("utf-8")


def read_file(path: Path, most: int) -> bytes:
    """The content of a regular file.

    **Arguments:**

    - `path`: its name, without wildcards.
    - `most`: how many bytes it may have.

    **Raises:**

    `ValueError` if it is not a regular file (but a folder, a pipe or a device), or is larger;
    `OSError` if it cannot be read.
    """
    check_file(path, most)
    # A pipe that took its place is not waited for.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        _check_regular(path, os.fstat(file.fileno()))
        content = file.read(most + 1)
    _check_size(path, len(content), most)  # Some have a size of zero, and content.
    return content


def check_file(path: Path, most: int) -> None:
    """Raises as `read_file` does, without reading the file."""
    name = os.fspath(path)
    if "\0" in name:
        raise ValueError(f"{shown(path)}: no name of a file has a zero byte; give another.")
    # By the name as it was given: `pathlib` drops a `/` at its end, which only a folder can have.
    status = os.stat(name)
    _check_regular(path, status)
    _check_size(path, status.st_size, most)


def shown(path: Path) -> str:
    """A path for a message; if it is very long, only its end."""
    text = quoted(os.fspath(path), 10_000)
    return text if len(text) <= _MOST_OF_A_PATH else f"...{text[3 - _MOST_OF_A_PATH :]}"


def check_writable(folder: Path) -> None:
    """Raises an `OSError` unless files can be created in a folder or, if it does not exist, in its
    nearest existing parent. Permissions are not enough to know this: some mounts accept no files.
    """
    there = pathlib.Path(folder).absolute()
    while not there.exists():
        there = there.parent
    with tempfile.TemporaryFile(dir=there):
        pass


@contextlib.contextmanager
def written_whole(path: Path, *, first: bool = False) -> Iterator[pathlib.Path]:
    """Yields the name of a file to write, which replaces `path` when it is complete.

    Each writer has a different file, and none is left behind.

    **Arguments:**

    - `first`: whether the first writer wins, and later files are dropped.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "Is a folder", shown(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "No such folder", shown(path.parent))
    partial = path.with_name(f".{path.name[:200]}.{secrets.token_hex(6)}.partial")
    try:
        yield partial
        if not first or not _linked(partial, path):
            os.replace(partial, path)
    except OSError as error:
        if error.filename is None:  # Such as a full disk, which names no file.
            error.filename = shown(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def _linked(partial: pathlib.Path, path: pathlib.Path) -> bool:
    """Gives a file its name if the name is free: a link, unlike a move, does not replace a file.
    `False` if the file system has no links.
    """
    try:
        os.link(partial, path)
    except FileExistsError:
        pass
    except OSError:
        return False
    return True


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise ValueError(f"{shown(path)}: this is {kind}; give a file.")


def _check_size(path: Path, size: int, most: int) -> None:
    if size > most:
        raise ValueError(
            f"{shown(path)}: this is larger than the {most / 2**20:,.0f} MiB that are read; give a "
            "smaller file."
        )


def write_archive(path: Path, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a file, whole or not at all."""
    everything: dict[str, Any] = {**arrays, _ABOUT: np.array(json.dumps(header))}
    with written_whole(path) as partial, open(partial, "wb") as file:
        np.savez_compressed(file, **everything)


def read_archive(
    path: Path, about_type: type[_T], noun: str, writer: str
) -> tuple[_T, dict[str, np.ndarray]]:
    """Reads the description, converted, and the arrays.

    **Arguments:**

    - `about_type`: the type of the description.
    - `noun`, `writer`: what the file should hold, and the function that writes such files, for
        messages.

    **Raises:**

    `ValueError` of one sentence if the file is damaged or of another kind; `OSError` if it cannot
    be read.
    """
    if not isinstance(path, str):
        check_type(path, os.PathLike, "path", "give a string or a path")
    content = read_file(path, _MOST_BYTES)
    try:
        arrays = _arrays(content)
        header = json.loads(str(arrays.pop(_ABOUT)))
        return msgspec.convert(header, about_type), arrays
    except Exception as error:  # Damaged archives raise almost anything.
        raise damaged(path, noun, writer) from error


def damaged(path: Path, noun: str, writer: str) -> ValueError:
    """The error for a file that is damaged or of another kind."""
    return ValueError(
        f"`{shown(path)}` is not a {noun} that this version saved; give a file that `{writer}` "
        "of this version wrote."
    )


def _arrays(content: bytes) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(io.BytesIO(content)) as members:
        if sum(member.file_size for member in members.infolist()) > _MOST_BYTES:
            raise ValueError
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return dict(archive)

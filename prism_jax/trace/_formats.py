"""The formats of traces, and the files of their ranks."""

import dataclasses
import os
import re
from collections.abc import Callable, Iterator

from .._files import shown
from .._misc import unknown_name
from ._chakra import read_chakra
from ._kineto import read_kineto
from ._nsight import read_nsight
from ._spans import RankTrace


FORMATS: dict[str, tuple[tuple[str, ...], Callable[..., RankTrace]]] = {
    "kineto": ((".json", ".json.gz"), read_kineto),
    "chakra": ((".et", ".json"), read_chakra),
    "nsight": ((".sqlite",), read_nsight),
}
_RANK = re.compile(r"(?:rank|gpu|worker)[-_. ]?(\d{1,7})(?!\d)", re.IGNORECASE)
_CHAKRA = re.compile(r"\.(\d{1,7})\.(?:et|json)$")  # As its converter names them.


def read_ranks(
    path: str | os.PathLike[str], format: str = "kineto", *, time_unit: str | None = None
) -> Iterator[RankTrace]:
    """Reads the traces of a job's ranks, one at a time, so that only one of them is in memory.

    **Arguments:**

    - `path`: a file, or a folder with a file for each rank.
    - `format`: one of `FORMATS`.
    - `time_unit`: as in `read_kineto`.

    **Raises:**

    `ValueError` if the format is not known, there are no files, a file is not a trace, or two files
    are of the same rank.
    """
    if format not in FORMATS:
        raise ValueError(unknown_name("format of traces", format, FORMATS))
    suffixes, read = FORMATS[format]
    seen: dict[int, str] = {}
    files = _files(path, suffixes)
    for file in files:
        trace = read(file, time_unit=time_unit)
        rank = trace.rank if trace.rank is not None else _rank_of_name(file)
        if rank is None and len(files) > 1:
            raise ValueError(
                f"{shown(file)}: neither the file nor its name says which rank it is of; name it "
                f"`rank<number>{suffixes[0]}`."
            )
        rank = rank or 0
        if rank in seen:
            raise ValueError(
                f"{shown(file)}: this is of rank {rank}, and so is {shown(seen[rank])}; keep one "
                "of them."
            )
        seen[rank] = file
        yield dataclasses.replace(trace, rank=rank)


def _files(path: str | os.PathLike[str], suffixes: tuple[str, ...]) -> list[str]:
    name = os.fspath(path)
    if not os.path.isdir(name):
        return [name]
    files = sorted(
        entry.path
        for entry in os.scandir(name)
        if entry.is_file() and entry.name.endswith(suffixes)
    )
    if not files:
        raise ValueError(
            f"{shown(path)}: the folder has no {' or '.join(suffixes)} files; give the "
            "one with the traces of the ranks."
        )
    return files


def _rank_of_name(path: str) -> int | None:
    name = os.path.basename(path)
    found = _RANK.findall(name) or _CHAKRA.findall(name)
    return int(found[-1]) if found else None

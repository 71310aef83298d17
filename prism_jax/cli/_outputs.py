"""What a command writes, checked before it begins: what is there stays, except with `--force`, and
what it reads stays in any case.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .._files import check_writable, shown
from ..data import parse_toml, read_text


# Arguments that may name a folder, all of whose files are read.
_FOLDERS = ("job", "jobs", "trace")
# Bytes of a TOML file.
_MOST = 2**21


@dataclasses.dataclass(frozen=True)
class Writes:
    """An argument with the place of what a command writes.

    **Attributes:**

    - `argument`: its name, such as `--out`.
    - `suffix`: the end of the name of a file; empty for a folder, which need not be there.
    - `names`: gives the files of the folder that the command would replace; without it there are
        none, as of a folder to which rows are added.
    """

    argument: str
    suffix: str = ""
    names: Callable[[], Sequence[str]] | None = None

    @property
    def replaces(self) -> bool:
        """Whether it could replace a file, so that there is a `--force`."""
        return bool(self.suffix or self.names)


def check_writes(args: Any, writes: Writes) -> None:
    """Raises a `ValueError` of one sentence unless a command can write there, without replacing a
    file that is there (except with `--force`) or that it reads.
    """
    argument = writes.argument.lstrip("-")
    path = getattr(args, argument)
    if path is None:
        return
    option = "" if writes.argument == argument else f"{writes.argument} "
    place = f"{option}`{shown(path)}`"
    if writes.suffix:
        _check_file(path, writes.suffix, place)
        files = {path: place}
    else:
        _check_folder(path, place)
        names = writes.names() if writes.names else ()
        for inner in {os.path.dirname(name) for name in names} - {""}:
            _check_folder(os.path.join(path, inner), place)
        files = {os.path.join(path, name): f"{place} has a `{name}`, which" for name in names}
    inputs = {*_inputs(args, argument)}
    for file in filter(os.path.lexists, files):
        if os.path.exists(file) and any(os.path.samefile(file, read) for read in inputs):
            raise ValueError(f"{files[file]} is read by this command, too; give another place.")
        if not args.force:
            raise ValueError(
                f"{files[file]} is there already; give another place, or `--force` to overwrite it."
            )


def _check_file(path: str, suffix: str, place: str) -> None:
    folder = os.path.dirname(path) or "."
    try:
        check_writable(folder)
        good = path.endswith(suffix) and not os.path.isdir(path) and os.path.isdir(folder)
    except OSError:
        good = False
    if not good:
        raise ValueError(
            f"{place} must be a {suffix} file in a folder that exists and can be written to."
        )


def _check_folder(path: str, place: str) -> None:
    if not path or (os.path.exists(path) and not os.path.isdir(path)):
        raise ValueError(f"{place} is not a folder; give the name of one.")
    try:
        check_writable(path)
    except OSError as error:
        raise ValueError(
            f"{place}: nothing can be written there ({error.strerror}); give another folder."
        ) from None


def _inputs(args: Any, argument: str) -> Iterator[str]:
    """The files that other arguments name, such as `job.toml` or `model=model.toml`, and those in
    the folder of a profile or a trace.
    """
    for name, value in vars(args).items():
        for text in value if isinstance(value, list) else [value]:
            if name == argument or not isinstance(text, str):
                continue
            for file in filter(os.path.isfile, (text, text.partition("=")[2])):
                yield file
                yield from _named_in(file)
            if name in _FOLDERS and os.path.isdir(text):
                yield from (file.path for file in os.scandir(text) if file.is_file())


def _named_in(file: str) -> Iterator[str]:
    """The files that a job file names, such as its model or cluster, beside it."""
    if not file.endswith(".toml"):
        return
    try:
        values: list[Any] = [parse_toml(read_text(file, _MOST))]
    except ValueError:  # The command says what is wrong with it.
        return
    while values:
        value = values.pop()
        if isinstance(value, dict | list):
            values += value.values() if isinstance(value, dict) else value
        elif isinstance(value, str):
            path = os.path.join(os.path.dirname(file), value)
            if os.path.isfile(path):
                yield path

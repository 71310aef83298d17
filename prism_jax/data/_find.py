"""Finds files: shipped ones by name, others by path."""

import importlib.resources
import os
import pathlib

from .._files import shown
from .._misc import unknown_name


_FOLDERS = {
    "job": "jobs",
    "model": "jobs/models",
    "device": "hardware/devices",
    "cluster": "hardware/clusters",
    "count of failures": "hardware/failures",
    "profile of kernels": "kernels",
    "software stack": "kernels/software",
}


def data_folder(folder: str) -> pathlib.Path:
    """A folder such as `"hardware/devices"`, in the wheel or in the checkout."""
    package = pathlib.Path(str(importlib.resources.files("prism_jax.data")))
    installed = package / folder
    return installed if installed.is_dir() else package.parents[1] / folder


def list_names(what: str) -> tuple[str, ...]:
    """The sorted names of what is shipped.

    **Arguments:**

    - `what`: of which kind, as messages call it: `job`, `model`, `device`, `cluster` (families of
        them), `count of failures`, `profile of kernels` (of devices and of clusters), or `software
        stack`.
    """
    folder = data_folder(_FOLDERS[what])
    if what == "profile of kernels":
        return tuple(sorted(path.parent.name for path in folder.glob("*/source.toml")))
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def is_path(name: str | os.PathLike[str]) -> bool:
    """Whether `name` is a path rather than the name of a shipped file."""
    if not isinstance(name, str):
        return True
    return name.endswith(".toml") or "/" in name or os.sep in name or name in (".", "..")


def find_file(
    what: str, name: str | os.PathLike[str], given_by: pathlib.Path | None = None
) -> pathlib.Path:
    """The file with a name or a path. A relative path is first looked up in the folder of the file
    that gives it.

    **Raises:**

    A `ValueError` if there is no such file.
    """
    known, by = list_names(what), f"{shown(given_by)}: " if given_by else ""
    if not isinstance(name, str | os.PathLike):
        raise ValueError(
            f"{by}A value of type {type(name).__name__} was given in place of a {what}; give the "
            "name of a shipped one, or the path of a `.toml` file."
        )
    if not is_path(name):
        if name not in known:
            raise ValueError(by + unknown_name(what, name, known))
        return data_folder(_FOLDERS[what]) / f"{name}.toml"
    name = os.fspath(name)
    # By the name as given, because `pathlib` drops a `/` at its end.
    if given_by is not None and not os.path.isabs(name):
        beside = os.path.join(given_by.parent, name)
        name = beside if os.path.exists(beside) else name
    if os.path.isdir(name):
        raise ValueError(
            f"{by}{shown(name)}: this is a folder, but a {what} is a `.toml` file; give the file."
        )
    if not os.path.exists(name):
        raise ValueError(
            f"{by}{shown(name)}: there is no such file; give a `.toml` file, or one of the shipped "
            f"names: {', '.join(known[:12]) or 'none'}."
        )
    return pathlib.Path(name)


def is_profile(name: str | os.PathLike[str]) -> bool:
    """Whether a path is the folder of a profile."""
    return os.path.isfile(os.path.join(name, "profile.toml"))

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
    "software stack": "kernels/software",
}


def data_folder(kind: str) -> pathlib.Path:
    """The folder of a kind, such as `"hardware/devices"`, in the wheel or in the checkout."""
    package = pathlib.Path(str(importlib.resources.files("prism_jax.data")))
    installed = package / kind
    return installed if installed.is_dir() else package.parents[1] / kind


def list_names(kind: str) -> tuple[str, ...]:
    """The sorted names of the shipped files of `kind`."""
    folder = data_folder(kind)
    if kind == "kernels":
        names = (path.parent.name for path in folder.glob("*/source.toml"))
    else:
        names = (path.stem for path in folder.glob("*.toml"))
    return tuple(sorted(names))


def is_path(name: str | os.PathLike[str]) -> bool:
    """Whether `name` is a path rather than the name of a shipped file."""
    if not isinstance(name, str):
        return True
    return name.endswith(".toml") or "/" in name or os.sep in name or name in (".", "..")


def list_jobs() -> tuple[str, ...]:
    """The names of the shipped jobs."""
    return list_names("jobs")


def list_models() -> tuple[str, ...]:
    """The names of the shipped models."""
    return list_names("jobs/models")


def list_devices() -> tuple[str, ...]:
    """The names of the shipped devices."""
    return list_names("hardware/devices")


def list_clusters() -> tuple[str, ...]:
    """The names of the shipped families of clusters."""
    return list_names("hardware/clusters")


def list_kernels() -> tuple[str, ...]:
    """The names of the shipped profiles of kernels: of devices and of clusters."""
    return list_names("kernels")


def list_software() -> tuple[str, ...]:
    """The names of the shipped stacks."""
    return list_names("kernels/software")


def list_failures() -> tuple[str, ...]:
    """The names of the shipped counts of failures."""
    return list_names("hardware/failures")


def find_file(
    what: str, name: str | os.PathLike[str], given_by: pathlib.Path | None = None
) -> pathlib.Path:
    """The file with a name or a path. A relative path is first looked up in the folder of the file
    that gives it.

    **Raises:**

    A `ValueError` if there is no such file.
    """
    folder, by = _FOLDERS[what], f"{shown(given_by)}: " if given_by else ""
    if not isinstance(name, str | os.PathLike):
        raise ValueError(
            f"{by}A value of type {type(name).__name__} was given in place of a {what}; give the "
            "name of a shipped one, or the path of a `.toml` file."
        )
    if not is_path(name):
        if name not in list_names(folder):
            raise ValueError(by + unknown_name(what, name, list_names(folder)))
        return data_folder(folder) / f"{name}.toml"
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
            f"names: {', '.join(list_names(folder)[:12]) or 'none'}."
        )
    return pathlib.Path(name)


def is_profile(name: str | os.PathLike[str]) -> bool:
    """Whether a path is the folder of a profile."""
    return os.path.isfile(os.path.join(name, "profile.toml"))

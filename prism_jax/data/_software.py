"""Software stacks: what each overlaps and fuses, as defaults of a job's `training`."""

import os
import pathlib
from typing import Any

import msgspec

from .._files import shown
from .._misc import quoted, unknown_name
from ._find import find_file, list_names
from ._read import convert, read_toml
from ._training import Training
from ._types import Label, Text


# Keys that belong to the job itself, so no software stack may set them.
_OF_A_JOB = ("microbatch_size", "sequence_length", "dtype", "software")


class Software(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A software stack.

    **Attributes:**

    - `source`: where its settings are from.
    - `training`: keys of `Training` with the values that the stack sets.
    - `name`: the name of the stack.
    """

    source: Text
    training: dict[str, Any]
    name: Label = ""


def list_software() -> tuple[str, ...]:
    """The names of the shipped stacks."""
    return list_names("kernels/software")


def load_software(name: str | os.PathLike[str], given_by: pathlib.Path | None = None) -> Software:
    """Loads a software stack by its name, if it is shipped, or by the path of a file.

    **Raises:**

    A `ValueError` of one sentence that names the file and the key.
    """
    path = find_file("kernels/software", name, given_by)
    raw = read_toml(path, "software")
    raw.setdefault("name", quoted(path.stem))
    found = convert(raw, Software, lambda key: shown(path))
    switches = {f.encode_name for f in msgspec.structs.fields(Training)} - {*_OF_A_JOB}
    for key in found.training:
        if key not in switches:
            known = (f"training.{switch}" for switch in switches)
            raise ValueError(f"{shown(path)}: {unknown_name('key', f'training.{key}', known)}")
    given = {"microbatch_size": 1, "sequence_length": 1, **found.training}
    convert({"training": given}, _Switches, lambda key: shown(path))
    return found


class _Switches(msgspec.Struct, frozen=True):
    training: Training

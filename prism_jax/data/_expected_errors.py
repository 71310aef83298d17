"""By how much published runs were off, by class of jobs (`kernels/expected_errors.toml`)."""

import functools as ft
import re

import msgspec

from .._files import shown
from ._find import data_folder
from ._read import convert, read_toml
from ._types import NonNegative, Positive, Text


# Parts of the names of devices. A device that is named otherwise is of a generation without runs.
_GENERATIONS = {"a100": "A100", "h100|h200|h800|h20": "Hopper", "b200|b300": "Blackwell"}


class ErrorClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The law of errors of a class of jobs.

    **Attributes:**

    - `model`: `dense` or `experts`.
    - `fsdp`: whether parameters are sharded (`training.zero` is 3).
    - `generation`, `software`: of the machine, and the stack; empty for all of them.
    - `bias`, `spread`: the median of the logarithm of measured over predicted seconds, and the
        scale of Student's law around it.
    - `num_runs`: how many published steps the law is of.
    - `table`: who published them.
    """

    model: Text
    fsdp: bool
    bias: float
    spread: Positive
    num_runs: int
    table: Text
    generation: str = ""
    software: str = ""

    @property
    def key(self) -> tuple[str, bool, str, str]:
        """What it is the class of."""
        return self.model, self.fsdp, self.generation, self.software


class ExpectedErrors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The laws of all classes.

    **Attributes:**

    - `source`: where the runs are from, and the command that makes the file.
    - `degrees`: the degrees of freedom of Student's law.
    - `variability`: how much longer steps that vary take than `predict` says, as a share.
    - `unknown`: the factor on the spread for a class without runs.
    - `classes`: the classes.
    """

    source: Text
    degrees: Positive
    variability: NonNegative
    unknown: Positive
    classes: tuple[ErrorClass, ...]


def generation_of(device: str) -> str:
    """The generation of a device by its name: `A100`, `Hopper`, `Blackwell` or `other`."""
    found = (name for part, name in _GENERATIONS.items() if re.search(part, device.lower()))
    return next(found, "other")


@ft.cache
def load_expected_errors() -> ExpectedErrors:
    """The laws that are shipped."""
    path = data_folder("kernels") / "expected_errors.toml"
    return convert(read_toml(path, "expected-errors"), ExpectedErrors, lambda key: shown(path))

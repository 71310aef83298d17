"""Reads a profile and checks its laws, because `data` does not know the families of laws."""

import os

from .. import data
from ..data import Profile
from ._check import check_variability
from ._variability import variability_of


def load_profile(folder: str | os.PathLike[str]) -> Profile:
    """Reads a profile from a folder that `save_profile` wrote.

    **Raises:**

    A `ValueError` of one sentence that names the file and the key or line.
    """
    return data.load_profile(folder, lambda law: check_variability(variability_of([law])))

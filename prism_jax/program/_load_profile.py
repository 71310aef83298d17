"""Reading a profile with the check of its laws, which the layer of files cannot make."""

import os

from .. import data
from ..data import Profile
from ._check import check_variability
from ._variability import variability_of


def load_profile(folder: str | os.PathLike[str]) -> Profile:
    """Reads a profile from its folder.

    **Raises:**

    A `ValueError` of one sentence that names the file and the key, or file and line.
    """
    return data.load_profile(folder, lambda law: check_variability(variability_of([law])))

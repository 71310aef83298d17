"""Log-normal laws, which need no table of their quantiles."""

import functools as ft

from jaxtyping import Array, Float

from ._base import AbstractLatency


# The files of the families say what it is for them.
@ft.singledispatch
def log_sigma(law: AbstractLatency) -> Float[Array, "..."] | None:
    r"""The $\sigma$ of a law that is a constant times $\exp(\sigma z)$; `None` for other laws."""
    del law
    return None

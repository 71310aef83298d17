"""The packages of the library, each imported when a command first asks for it: most import JAX,
which takes a second, and bad input is refused before that.
"""

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .. import (
        analysis as analysis,
        calibration as calibration,
        cluster as cluster,
        diagnosis as diagnosis,
        engine as engine,
        importers as importers,
        law as law,
        layouts as layouts,
        lowering as lowering,
        measure as measure,
        placement as placement,
        plot as plot,
        prediction as prediction,
        profile as profile,
        program as program,
        report as report,
        runs as runs,
        trace as trace,
        workers as workers,
        workload as workload,
    )


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    return importlib.import_module(f"prism_jax.{name}")

"""The distribution of a training step's time, and which kernels' variability makes it wide."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from . import (
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
        prediction as prediction,
        profile as profile,
        program as program,
        runs as runs,
        trace as trace,
        workload as workload,
    )
    from ._public import *  # noqa: F403
    from .schedules import *  # noqa: F403

    __version__: str


# Imported when first asked for: the command line needs little of it, and can be interrupted only
# once its own handler is there.
def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("prism-jax")
    if name == "__all__":
        return __dir__()
    if name.startswith("_"):
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    if importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    # Schedules are names of the package, too, such as `prism.OneFOneB`; `dir` leaves them out.
    for module in ("_public", "schedules"):
        found = importlib.import_module(f"{__name__}.{module}")
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")


def __dir__() -> list[str]:
    public = importlib.import_module(f"{__name__}._public")
    return sorted(name for name in vars(public) if not name.startswith("_"))

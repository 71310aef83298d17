"""Work on other processes and machines."""

import argparse
import contextlib
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor

from ._options import Given, argument
from ._values import count


def _address(text: str) -> str:
    """The address of a Ray cluster."""
    if not text.strip():
        raise argparse.ArgumentTypeError(
            "the address is empty; give host:port or auto, or leave it out for this machine"
        )
    return text


RAY = (
    argument(
        "--ray ADDRESS",
        "simulate on the workers of a Ray cluster: host:port, or auto for the cluster on this "
        "machine; without ADDRESS, use that of RAY_ADDRESS, or else all cores of this machine",
        _address,
        nargs="?",
        const=True,
    ),
    argument("--worker-gpus N", "GPUs for each worker of --ray (0)", count),
)


@contextlib.contextmanager
def ray_executor(given: Given) -> Iterator[Executor | None]:
    """The executor of `--ray`; `None` without it. Ctrl-C and errors end the work of its workers."""
    if given.ray is None:
        if given.worker_gpus is not None:
            raise ValueError("`--worker-gpus` applies to the workers of `--ray`; give both.")
        yield None
        return
    from ..workers import RayExecutor

    executor = RayExecutor(
        None if given.ray is True else given.ray,
        num_gpus=given.worker_gpus or 0,
        keep=not given.no_cache,
    )
    try:
        yield executor
    except BrokenExecutor as error:
        raise RuntimeError(str(error)) from None
    finally:
        executor.shutdown(cancel_futures=True)

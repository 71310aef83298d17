"""Command-line arguments for work on other processes and machines."""

import argparse
import contextlib
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor

from .._misc import quoted
from ._arguments import count


def add_ray_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ray",
        nargs="?",
        const=True,
        type=_address,
        metavar="ADDRESS",
        help="simulate on the workers of a Ray cluster: host:port, or auto for the cluster on this "
        "machine; without ADDRESS, use that of RAY_ADDRESS, or else all cores of this machine",
    )
    parser.add_argument(
        "--worker-gpus", type=count, metavar="N", help="GPUs for each worker of --ray (0)"
    )


def _address(text: str) -> str:
    """The address of a Ray cluster."""
    if not text.strip():
        raise argparse.ArgumentTypeError(
            "the address is empty; give host:port or auto, or leave it out for this machine"
        )
    return text


@contextlib.contextmanager
def ray_executor(arguments: argparse.Namespace) -> Iterator[Executor | None]:
    """The executor of `--ray`; `None` without it. Ctrl-C and errors end the work of its workers."""
    if arguments.ray is None:
        if arguments.worker_gpus is not None:
            raise ValueError("`--worker-gpus` applies to the workers of `--ray`; give both.")
        yield None
        return
    from ..workers import RayExecutor

    executor = RayExecutor(
        None if arguments.ray is True else arguments.ray,
        num_gpus=arguments.worker_gpus or 0,
        keep=not arguments.no_cache,
    )
    try:
        yield executor
    except BrokenExecutor as error:
        raise RuntimeError(str(error)) from None
    finally:
        executor.shutdown(cancel_futures=True)


def shard(text: str) -> tuple[int, int]:
    """`I/N`, from `1/N` to `N/N`."""
    which, slash, shards = text.partition("/")
    numbers = (which.strip(), shards.strip())
    if slash and all(n.isdecimal() and len(n) < 10 for n in numbers):
        i, many = map(int, numbers)
        if 1 <= i <= many:
            return i, many
    raise argparse.ArgumentTypeError(
        f"`{quoted(text)}` must be a share such as 3/16, from 1/16 to 16/16"
    )

"""Ray as a `concurrent.futures.Executor`."""

import concurrent.futures as cf
import functools as ft
import logging
import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

from .._misc import quoted
from ._tasks import prepare_worker


_SECONDS_TO_ANSWER = 5.0


class RayExecutor(cf.Executor):
    """An executor that makes calls on the workers of a Ray cluster. Ray repeats a call if its
    worker or machine dies. The same version of this package must be installed on all machines of
    the cluster.

    **Arguments:**

    - `address`: the `host:port` of a cluster, or `auto` for the cluster that runs on this machine.
        By default, the environment variable `RAY_ADDRESS`; if it is not set, a new cluster is
        started on this machine.
    - `num_cpus`, `num_gpus`: how many CPUs and GPUs a call reserves.
    - `max_retries`: how often a call is repeated after its worker died.
    - `keep`: as in [`prepare_worker`][].

    **Raises:**

    `ValueError` if Ray is not installed, if no cluster answers, or if this process is already
    connected to a cluster.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        max_retries: int = 3,
        keep: bool = True,
    ):
        self._ray = _connected(address)
        resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        self._call = self._ray.remote(max_retries=max_retries, **resources)(_call)
        self._keep = keep
        self._pending: set[cf.Future[Any]] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> cf.Future[Any]:
        reference = self._call.remote(self._keep, fn, args, kwargs)
        future: cf.Future[Any] = cf.Future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        future.add_done_callback(ft.partial(self._cancel, reference))
        reference.future().add_done_callback(ft.partial(self._settle, future))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pending = list(self._pending)
        if cancel_futures:
            for future in pending:
                future.cancel()
        elif wait:
            cf.wait(pending)
        self._ray.shutdown()

    def _cancel(self, reference: Any, future: cf.Future) -> None:
        if future.cancelled() and self._ray.is_initialized():
            self._ray.cancel(reference, force=True)

    def _settle(self, future: cf.Future, of_ray: cf.Future) -> None:
        if not future.set_running_or_notify_cancel():
            return
        error = of_ray.exception()
        if error is None:
            future.set_result(of_ray.result())
        elif isinstance(error, self._ray.exceptions.RayTaskError):
            future.set_exception(getattr(error, "cause", None) or error)
        else:
            future.set_exception(cf.BrokenExecutor(str(error)))


def _call(keep: bool, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Makes a call, in a worker."""
    prepare_worker(keep)
    return function(*args, **kwargs)


def _connected(address: str | None) -> Any:
    """The module `ray`, connected to a cluster."""
    try:
        import ray
    except ImportError:
        raise ValueError(
            "Ray is not installed; `pip install 'prism-jax[ray]'`, here and on its machines."
        ) from None
    if ray.is_initialized():
        raise ValueError("This process is connected to a Ray cluster; call `ray.shutdown()` first.")
    address = address or os.environ.get("RAY_ADDRESS")
    try:
        if address and address not in ("auto", "local"):
            _check_answers(address)
        with warnings.catch_warnings():
            # JAX warns of forks; those of Ray become other programs at once.
            warnings.filterwarnings("ignore", r"os\.fork", RuntimeWarning)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError, SystemExit) as error:
        raise ValueError(
            f"No Ray cluster answers at `{quoted(address or 'its default address')}` "
            f"({quoted(str(error))}); start one by `ray start --head`, and give its `host:port`."
        ) from None
    return ray


def _check_answers(address: str) -> None:
    """Raises unless a cluster answers: Ray itself tries for two minutes, then ends the process."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError("this is not `host:port`")
    socket.create_connection((host, int(port)), _SECONDS_TO_ANSWER).close()

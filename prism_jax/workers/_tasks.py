"""Calls that are made in this process, or by the workers of an executor, such as a Ray cluster."""

import concurrent.futures as cf
import functools as ft
import logging
import multiprocessing
import os
import pickle
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from .._cache import keep_compiled
from .._installed import needed
from .._misc import quoted


_TICK, _SECONDS_TO_ANSWER = 0.2, 5.0


def run_tasks(
    function: Callable[..., Any],
    tasks: Sequence[tuple[Any, ...]],
    executor: cf.Executor | None,
    tick: Callable[[], object] = lambda: None,
) -> Iterator[tuple[int, Any]]:
    """Calls a function with the arguments of each task.

    **Arguments:**

    - `function`: a function at the top level of a module, or another callable that can be pickled.
    - `tasks`: the arguments of each call.
    - `executor`: any `concurrent.futures.Executor`. Its workers use the precision of this process
        (`jax_enable_x64`). Without an executor, all calls are made in this process, in order.
    - `tick`: is called some times a second while workers work. If it raises, those that have begun
        are not waited for.

    **Returns:**

    The number of each task and its result, in the order in which they are done.

    **Raises:**

    Whatever `function` raises. `BrokenExecutor` if workers died, after all other tasks are done.
    `ValueError` for an executor that forks its processes, or if something cannot be pickled.
    """
    if executor is None:
        yield from ((number, function(*task)) for number, task in enumerate(tasks))
        return
    _check_no_fork(executor)
    calls = [_packed(function, task) for task in tasks]
    broken: cf.BrokenExecutor | None = None
    numbers: dict[cf.Future[Any], int] = {}
    try:
        try:
            for number, call in enumerate(calls):
                numbers[executor.submit(call)] = number
        except cf.BrokenExecutor as error:
            broken = error
        waiting = {*numbers}
        while waiting:
            done, waiting = cf.wait(waiting, _TICK, cf.FIRST_COMPLETED)
            for future in sorted(done, key=numbers.__getitem__):
                try:
                    yield numbers[future], future.result()
                except cf.BrokenExecutor as error:
                    broken = error
            tick()
    finally:
        for future in numbers:
            future.cancel()
    if broken is not None:
        raise cf.BrokenExecutor(
            "A worker died before its task was done: it was killed, or there was too little memory "
            "for so many."
        ) from broken


def prepare_worker(keep: bool = True) -> None:
    """Limits JAX to one core in this process, because workers share a machine, and ends it when
    that which made a pool of processes was killed.

    Call it first in each worker, before JAX is used:
    `ProcessPoolExecutor(initializer=prepare_worker, ...)`. Once JAX is in use, it has no effect on
    the number of cores.

    **Arguments:**

    - `keep`: whether compiled code is kept in a cache on disk for other processes, as on the
        command line.
    """
    _end_with_driver()
    os.environ.setdefault("NPROC", "1")  # XLA makes as many threads.
    if keep:
        keep_compiled()


@ft.cache
def _end_with_driver() -> None:
    """Ends this process, if it is of a pool, when that which made the pool is killed: a worker that
    waits for its next call, or has one in hand, would stay for ever.
    """
    driver = multiprocessing.parent_process()

    def wait() -> None:
        assert driver is not None
        driver.join()
        os._exit(1)

    if driver is not None:
        threading.Thread(target=wait, daemon=True).start()


def _packed(function: Callable[..., Any], task: tuple) -> Callable[[], Any]:
    """The call, pickled; with the precision of this process, or arrays would lose theirs."""
    try:
        content = pickle.dumps((function, task))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"A task cannot be sent to a worker ({error}); define what it uses in a module."
        ) from None
    return ft.partial(_made, content, jax.config.read("jax_enable_x64"))


def _made(content: bytes, x64: bool) -> Any:
    _end_with_driver()
    with jax.enable_x64(x64):
        function, task = pickle.loads(content)
        return function(*task)


def _check_no_fork(executor: cf.Executor) -> None:
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise ValueError(
            "The executor's processes are forks of this one, in which JAX may wait forever; give "
            '`ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"))`.'
        )


class RayExecutor(cf.Executor):
    """An executor that makes calls on the workers of a Ray cluster. Ray repeats a call if its
    worker or machine dies. The same version of this package must be installed on all machines of
    the cluster. A cluster that is started here sends no usage statistics, unless the environment
    variable `RAY_USAGE_STATS_ENABLED` says otherwise.

    **Arguments:**

    - `address`: the `host:port` of a cluster, or `auto` for the cluster that runs on this machine.
        By default, the environment variable `RAY_ADDRESS`; if it is not set, a new cluster is
        started on this machine.
    - `num_cpus`, `num_gpus`: how many CPUs and GPUs a call reserves.
    - `max_retries`: how often a call is repeated after its worker died.
    - `keep`: as in [`prepare_worker`][].

    **Raises:**

    `ImportError` if Ray is not installed; `ValueError` if no cluster answers, or if this process is
    already connected to a cluster.
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
    ray = needed("ray")
    if ray.is_initialized():
        raise ValueError("This process is connected to a Ray cluster; call `ray.shutdown()` first.")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # It sends them unless told not to.
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

"""Calls that are made in this process, or by the workers of an executor."""

import concurrent.futures as cf
import dataclasses
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from .._cache import keep_compiled


_TICK = 0.2  # Seconds.


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
        left = {*numbers}
        while left:
            done, left = cf.wait(left, _TICK, cf.FIRST_COMPLETED)
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
    """Limits JAX to one core in this process, because workers share a machine.

    Call it first in each worker, before JAX is used:
    `ProcessPoolExecutor(initializer=prepare_worker, ...)`. Once JAX is in use, it has no effect on
    the number of cores.

    **Arguments:**

    - `keep`: whether compiled code is kept in a cache on disk for other processes, as on the
        command line.
    """
    os.environ.setdefault("NPROC", "1")  # XLA makes as many threads.
    if keep:
        keep_compiled()


@dataclasses.dataclass(frozen=True)
class _Call:
    """A pickled call. It is unpickled with the precision of the sender, or arrays would lose
    theirs.
    """

    content: bytes
    x64: bool

    def __call__(self) -> Any:
        with jax.enable_x64(self.x64):
            function, task = pickle.loads(self.content)
            return function(*task)


def _packed(function: Callable[..., Any], task: tuple) -> _Call:
    try:
        content = pickle.dumps((function, task))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"A task cannot be sent to a worker ({error}); define what it uses in a module."
        ) from None
    return _Call(content, jax.config.read("jax_enable_x64"))


def _check_no_fork(executor: cf.Executor) -> None:
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise ValueError(
            "The executor's processes are forks of this one, in which JAX may wait forever; give "
            '`ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"))`.'
        )

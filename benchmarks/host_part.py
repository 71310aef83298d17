"""How long the host takes for a step of `simulate`: python benchmarks/host_part.py

The work is cut up as for one accelerator, which takes no time: what it computes from arrays of some
shape is kept, and given again for all others of this shape. What is left is the work of the host.
The steps are those of a batch again and again, so the law has no meaning.
"""

import functools as ft
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import primitives


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from benchmarks import _baselines, _with_engine
from prism_jax import Program, compile_job, load_job, simulate
from prism_jax.engine import _pools, _together
from prism_jax.replica import _tiles
from prism_jax.step import _pool
from validation.tables import Row, options, table_of


_REPLICAS, _STEPS = (1, 64, 1024), 20_000_000
_JOB, _STEPS_OF_JOB = "gpt3-175b-h100-4096", 200_000
_REPEATS, _FEW = 9, 4096
_given: dict[Any, Any] = {}  # What functions gave.


def main() -> None:
    """Prints a table in Markdown."""
    given = options(__doc__, json=(False, "print the rows as JSON"))
    as_for_an_accelerator()
    rows = list(host_rows())
    columns = {"program": "{program}", "replicas": "{replicas}", "ns a step": "{ns_a_step:.0f}"}
    print(json.dumps(rows, indent=1) if given.json else table_of(rows, columns))


def host_rows() -> Iterator[Row]:
    """A row for each program."""
    graph = _baselines.reference_graph()
    for number in _REPLICAS:
        program = _with_engine.program(graph, number)
        yield {"program": "reference", "replicas": number, "ns_a_step": ns_a_step(program, _STEPS)}
    program = compile_job(load_job(_JOB))
    seconds = ns_a_step(program, _STEPS_OF_JOB)
    yield {"program": _JOB, "replicas": program.num_replicas, "ns_a_step": seconds}


def ns_a_step(program: Program, steps: int) -> float:
    """The CPU time of the calling thread in nanoseconds a step, without what a run of few steps
    takes as well: the least of several, after one that is not counted.
    """
    _given.clear()

    def once(seed: int, number: int) -> float:
        key, start = jax.random.key(seed), time.thread_time()
        simulate(program, num_samples=number, key=key, sampling="plain")
        return time.thread_time() - start

    few, many = ([once(k, n) for k in range(1 + _REPEATS)][1:] for n in (_FEW, steps))
    return 1e9 * (min(many) - min(few)) / (steps - _FEW)


def as_for_an_accelerator() -> None:
    """What the engine gives to devices is cut up as for an accelerator, and computed once."""
    _tiles.on_accelerator = _pools.on_accelerator = lambda: True
    _tiles.fitting_tiles = lambda lower, room: room
    of_tiles = _tiles._jitted
    _tiles._jitted = ft.cache(lambda *args: given_again(of_tiles(*args[:-1], False)))
    _tiles._flat = given_again(_tiles._flat)
    # A CPU with nothing else to do cuts arrays in the calling thread.
    primitives.slice_p.def_impl(given_again(primitives.slice_p.impl))
    _pool._arrange_on_device = given_again(_pool._arrange_on_device)
    _pool._arrange_each_on_device = given_again(_pool._arrange_each_on_device)
    _pool._slowest_on_device = given_again(_pool._slowest_on_device)
    of_jax = type(jax.jit(len))
    for module in (_pools, _together):
        for name in [name for name, x in vars(module).items() if isinstance(x, of_jax)]:
            setattr(module, name, given_again(getattr(module, name)))


def given_again(jitted: Any) -> Any:
    """A compiled function that runs once for each shape of its arguments, and for each program."""

    def run(*args, **params):
        leaves, tree = jax.tree.flatten(args)
        arrays = (jax.Array, np.ndarray, np.generic)
        shapes = [(x.shape, x.dtype) if isinstance(x, arrays) else x for x in leaves]
        place = jitted, tree, *shapes, *params.values()
        if place not in _given:
            _given[place] = jax.block_until_ready(jitted(*args, **params))
        return _given[place]

    run.lower = getattr(jitted, "lower", None)
    return run


if __name__ == "__main__":
    main()

"""What an accelerator does, in three minutes: python benchmarks/on_device.py > device.json

By tiles side by side, op evaluations a second of the reference step, and seconds to compile: with
the loops of XLA, with these in CUDA graphs, with one kernel for all levels, and without the search
for faster fusions; and the derivatives, with loops, with a kernel forward and with another for the
way back; then steps a second of
`simulate`, a gradient and a sweep, end to end; and how far laws and derivatives are from those
of a CPU in another process. Rows are printed as JSON as they are known. With `--dry` a little of
each runs on a CPU, without what only GPUs have.
"""

import functools as ft
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
import prism_jax as prism
from benchmarks import _baselines, _with_engine
from benchmarks.sweeps import _sweep
from prism_jax import replica
from prism_jax.maxplus import _kernel_back, _propagate
from prism_jax.maxplus._derivative import along_path
from prism_jax.random import key_data
from prism_jax.replica import TILE, _tiles
from validation.tables import Row, options


_TILES, _REPEATS = (8, 32, 128, 512), 7
_JOBS = ("gpt3-175b-h100-4096", "megatron-22b-a100-8")
_STEPS = {"reference": 4_000_000, "gpt3-175b-h100-4096": 400_000}
_COMPARED = 16_384  # Steps of the laws that are compared.
_NOT_TUNED = _tiles.COMPILER_OPTIONS["gpu"]
_GRAPHS = {name: value for name, value in _NOT_TUNED.items() if "command_buffer" in name}


def main() -> None:
    """Prints a row a line."""
    given = options(
        __doc__,
        dry=(False, "a little of each, on a CPU"),
        figures=(False, "print the laws that are compared, and nothing else"),
    )
    if given.figures:
        print(json.dumps(figures(given.dry)))
        return
    print(json.dumps({"device": jax.devices()[0].device_kind, "jax": jax.__version__}), flush=True)
    for rows in (correctness, by_tiles, end_to_end):
        for row in rows(given.dry):
            print(json.dumps(row), flush=True)


def correctness(dry: bool) -> Iterator[Row]:
    """How far figures are from those of a CPU, relative to these."""
    command = [sys.executable, __file__, "--figures", *(["--dry"] if dry else [])]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    here = figures(dry)
    for name, of_cpu in json.loads(run.stdout).items():
        apart = np.abs(np.subtract(here[name], of_cpu))
        yield {"figures": name, "apart": float(np.max(apart / np.max(np.abs(of_cpu))))}


def figures(dry: bool) -> dict[str, list[float]]:
    """Means and quantiles of jobs, and the derivatives of a p95."""
    number, key = 4096 if dry else _COMPARED, jax.random.key(0)
    rows = {}
    for name in _JOBS[1:] if dry else _JOBS:
        program = prism.compile_job(prism.load_job(name))
        law = prism.simulate(program, num_samples=number, key=key)
        rows[name] = [law.mean, *(law.quantile(q) for q in (0.05, 0.5, 0.95, 0.99))]
        rows[f"gradient of {name}"] = _gradient(program, number)
    return rows


def _gradient(program: prism.Program, number: int) -> list[float]:
    """The derivatives of a p95 with respect to the means of kernels."""
    of_p95 = eqx.filter_grad(
        lambda program: prism.estimate(
            program, prism.Quantile(0.95), num_samples=number, key=jax.random.key(1)
        )
    )(program)
    return np.ravel(of_p95.latencies.mean).tolist()


def by_tiles(dry: bool) -> Iterator[Row]:
    """Op evaluations a second of the reference step, by tiles side by side and by how."""
    program = _with_engine.program(_baselines.reference_graph(), 1)
    shared = replica.make_plan(program), key_data(jax.random.key(0))
    value, gradient = _with_engine._value_of_tile, _with_engine._value_and_gradient_of_tile
    hopper, kernel_back = _propagate.on_hopper(), _kernel_back.one_kernel_back

    def loops_back(*args, interpret):
        return along_path(*args)

    for tiles in (1,) if dry else _TILES:
        for name, function, kernels, compiled_with in (
            ("loops", value, 0, {}),
            ("loops in graphs", value, 0, _GRAPHS),
            ("one kernel", value, 1, {}),
            ("as it is: one kernel, in graphs, not tuned", value, 1, _NOT_TUNED),
            ("gradient, loops", gradient, 0, {}),
            ("gradient, one kernel, loops back", gradient, 1, {}),
            ("gradient, one kernel, loops back in graphs", gradient, 1, _GRAPHS),
            ("gradient, one kernel each way", gradient, 2, {}),
            (
                "gradient, as it is: one kernel each way, in graphs, not tuned",
                gradient,
                2,
                _NOT_TUNED,
            ),
        ):
            if (kernels or compiled_with) and not hopper:
                continue
            _propagate.on_hopper = lambda kernels=kernels: kernels > 0
            _kernel_back.one_kernel_back = kernel_back if kernels > 1 else loops_back
            row = _timed(function, shared, tiles, compiled_with, 1 if dry else _REPEATS)
            row["per_s"] = program.num_ops * row["samples"] / row["seconds"]
            yield {"how": name, "tiles": tiles} | row
    _propagate.on_hopper, _kernel_back.one_kernel_back = lambda: hopper, kernel_back


def _timed(function, shared, tiles: int, options: Row, repeats: int) -> Row:
    """The least seconds of a call, those to compile it, and the mean of its first result."""
    arrays, static = eqx.partition(shared, eqx.is_array)
    leaves, tree = jax.tree.flatten(static)
    devices = len(jax.devices())
    ids = jnp.arange(devices * tiles * TILE, dtype=jnp.uint32).reshape(-1, TILE)
    turns = jnp.ones(devices, jnp.int32)
    # A function of its own each time: JAX would return what it compiled with other options.
    run = jax.jit(ft.partial(_tiles._run, _tiles._mesh(), True, function, (tuple(leaves), tree)))
    start = time.perf_counter()
    call = run.lower(arrays, turns, ids, ()).compile(options)
    compile_s, seconds, result = time.perf_counter() - start, [], None
    for _ in range(1 + repeats):
        start = time.perf_counter()
        result = jax.block_until_ready(call(arrays, turns, ids, ()))
        seconds.append(time.perf_counter() - start)
    total = float(np.sum(np.asarray(jax.tree.leaves(result)[0], np.float64)))
    row = {"samples": ids.size, "mean": total / ids.size, "compile_s": compile_s}
    return row | {"seconds": min(seconds[1:])}


def end_to_end(dry: bool) -> Iterator[Row]:
    """Steps a second of whole calls, what they compile included and not."""
    programs = {"reference": _with_engine.program(_baselines.reference_graph(), 1)}
    programs |= {name: prism.compile_job(prism.load_job(name)) for name in _JOBS[: 1 - dry]}
    for name, program in programs.items():
        number = 4096 if dry else _STEPS[name]

        def simulate(seed, program=program, number=number):
            key = jax.random.key(seed)
            prism.simulate(program, num_samples=number, key=key, sampling="plain")

        yield {"call": "simulate", "program": name} | _twice(simulate, number * program.num_ops)
        fewer = min(number, _COMPARED)
        gradient = ft.partial(_gradient, program, fewer)
        yield {"call": "gradient", "program": name} | _twice(
            lambda _, gradient=gradient: gradient(), fewer * program.num_ops
        )
    points = 2 if dry else 1000
    yield {"call": "sweep", "program": _JOBS[1], "points": points} | _twice(
        lambda _: _sweep(_JOBS[1], points), points
    )


def _twice(call: Callable[[int], Any], amount: int) -> Row:
    """The seconds of a first call, and how much a second does the second time."""
    seconds = []
    for seed in range(2):
        start = time.perf_counter()
        call(seed)
        seconds.append(time.perf_counter() - start)
    return {"first_s": seconds[0], "again_s": seconds[1], "per_s": amount / seconds[1]}


if __name__ == "__main__":
    main()

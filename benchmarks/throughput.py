"""How fast the engine is, beside NumPy, SimPy, mc_dagprop and its own random numbers.

    python benchmarks/throughput.py          # a report; --json for one JSON object

Everything is measured side by side in one run: after a warm-up, all programs take turns. A figure
is the median of its repeats (nine by default). A ratio is the median of the ratios of two programs
in the same repeat. Read the ratios: the other figures depend on the machine and its load. The
reference step is in `_graph.py`: 1F1B, 8 stages x 32 microbatches, 512 log-normal ops, sampling
included. `startup.py` measures whole commands.

Keys of the JSON object:

- `samples_per_s`: the rate of `simulate`, without compilation. `core_samples_per_s`: the rate of
  samples of one replica on the devices, as the gradient is measured.
- `over_numpy`, `over_numpy_2`: speedup over NumPy with `Generator.standard_normal`, on one thread
  and in two processes. `..._box_muller`: speedup over NumPy with normals by the Box-Muller
  transform, which is faster.
- `over_simpy`, `over_mc_dagprop`: speedup over these libraries (one thread each, against all our
  cores), `null` where they are not installed.
- `draws_per_s`: the rate of the engine's draws, mapped to latencies and summed without a graph.
  `of_draw_limit`: the share of this rate that the core reaches. `simulate_of_draw_limit`: the share
  that `simulate` reaches.
- `gradient_over_forward`: time of the core's value with all derivatives over that of the value.
- `compile_s`: graph, XLA and eight samples, for interleaved 1F1B of 16 ranks x 8 virtual stages
  x 256 microbatches.
- `compiled_s`, `recompiled_s`: set-up (graph and compilation) of the main job,
  `gpt3-175b-h100-4096`, in a new process, and of a second job in the same bucket of shapes.
  `layouts_per_minute`: 100 random 1F1B and interleaved layouts of the main job's GPUs, 65,536
  samples each, graph and set-up included.
- `replicas_ratio`: time of R = 8192 over R = 1 at 10^6 samples.
- `peak_rss_mib`: peak memory of a process after 10^6 and after 10^8 samples of R = 1024.
- `table`: samples per second against stages, microbatches, replicas and devices.
"""

import argparse
import functools as ft
import importlib.util
import json
import multiprocessing
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp


if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
from benchmarks import _with_engine, _with_libraries, _with_numpy
from benchmarks._graph import reference_graph
from prism_jax import compile_job, load_job, simulate
from prism_jax.replica import sample_replica_ends
from prism_jax.schedule import InterleavedOneFOneB
from tests.helpers import pipeline_program


_JOB, _GPUS, _LAYERS = "gpt3-175b-h100-4096", 4096, 96


def main() -> None:
    children = {"memory": memory, "layouts": layouts}
    children["one device"] = lambda: samples_per_s(8, 32, 1)
    parser = argparse.ArgumentParser(description="Throughput of the engine and its competitors.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--child", choices=children, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    devices = 1 if arguments.child == "one device" else os.cpu_count() or 1
    jax.config.update("jax_num_cpu_devices", devices)
    if arguments.child:
        print(json.dumps(children[arguments.child]()))
        return
    found = measure(arguments.repeats) | child("layouts")
    found |= {"peak_rss_mib": child("memory"), "table": table()}
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:>28}: {value:.4g}" if isinstance(value, float) else f"{name:>28}: {value}")


def measure(repeats: int) -> dict[str, Any]:
    """All figures of the reference step."""
    graph = reference_graph()
    # Its processes begin with the run that does not count.
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        per_sample = seconds_per_sample(contestants_on(graph, pool), repeats)

    def per_s(name: str) -> float:
        return 1 / statistics.median(per_sample[name])

    def ratio(name: str, base: str) -> float | None:
        """Of the time of a contestant over that of another, in the same repeat."""
        if name not in per_sample:
            return None
        pairs = zip(per_sample[name], per_sample[base], strict=True)
        return statistics.median(a / b for a, b in pairs)

    return {
        "device": str(jax.devices()[0].device_kind),
        "devices": len(jax.devices()),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "samples_per_s": per_s("simulate"),
        "core_samples_per_s": per_s("core"),
        **{f"over_{n}": ratio(n, "simulate") for n in per_sample if n.startswith("numpy")},
        "over_simpy": ratio("simpy", "simulate"),
        "over_mc_dagprop": ratio("mc_dagprop", "simulate"),
        "numpy_draws_per_s": graph.num_ops * per_s("numpy"),
        "draws_per_s": graph.num_ops * per_s("draws"),
        "of_draw_limit": ratio("draws", "core"),
        "simulate_of_draw_limit": ratio("draws", "simulate"),
        "gradient_over_forward": ratio("gradient", "core"),
        "replicas_ratio": ratio("replicas", "simulate"),
        "compile_s": compilation(),
    }


def contestants_on(graph, pool) -> dict[str, tuple[int, Callable[[], Any]]]:
    """How many samples each takes at once, and how; without what is not installed."""
    key = jax.random.key(0)
    program, many = _with_engine.program(graph), _with_engine.program(graph, 8192)
    n, few = 1_000_000, 100_000
    alone = ft.partial(_with_numpy.makespans, graph, few, 0)
    in_two = ft.partial(_with_numpy.makespans_in, pool, graph, few, 0)
    contestants: dict[str, tuple[int, Callable[[], Any]]] = {
        "simulate": (n, lambda: simulate(program, num_samples=n, key=key)),
        "replicas": (n, lambda: simulate(many, num_samples=n, key=key)),
        "draws": (n, lambda: _with_engine.draws(program, n, key)),
        "core": (n, lambda: _with_engine.value(program, n, key)),
        "gradient": (n, lambda: _with_engine.value_and_gradient(program, n, key)),
        "numpy": (few, lambda: alone(box_muller=False)),
        "numpy_2": (few, lambda: in_two(box_muller=False)),
        "numpy_box_muller": (few, alone),
        "numpy_2_box_muller": (few, in_two),
        "simpy": (500, lambda: _with_libraries.by_simpy(graph, 500, 0)),
        "mc_dagprop": (20_000, lambda: _with_libraries.by_mc_dagprop(graph, 20_000, 0)),
    }
    for library in ("simpy", "mc_dagprop"):
        if importlib.util.find_spec(library) is None:
            del contestants[library]
    return contestants


def seconds_per_sample(
    contestants: dict[str, tuple[int, Callable[[], Any]]], repeats: int
) -> dict[str, list[float]]:
    """Of each contestant in each repeat, after one that is not counted."""
    for _, run in contestants.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats):
        # In another order each time, for what ran before leaves caches and memory its way.
        for name in random.Random(repeat).sample(sorted(contestants), len(contestants)):
            count, run = contestants[name]
            start = time.perf_counter()
            run()
            found[name].append((time.perf_counter() - start) / count)
    return found


def compilation() -> float:
    """Seconds from a schedule to the first samples of a program that is new to the process."""
    ids = jnp.arange(8, dtype=jnp.uint32)
    start = time.perf_counter()
    program = pipeline_program(InterleavedOneFOneB(16, 256, 8))
    sample_replica_ends(program, ids, jax.random.key(0)).block_until_ready()
    return time.perf_counter() - start


def child(what: str) -> Any:
    """What this script prints in a process of its own."""
    command = [sys.executable, __file__, "--child", what]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def memory() -> dict[str, float]:
    """Peak resident memory after short and long runs, in MiB, on Linux."""
    peak = {}
    program = _with_engine.program(reference_graph(), 1024)
    for samples in (1_000_000, 100_000_000):
        simulate(program, num_samples=samples, key=jax.random.key(0), sampling="plain")
        # Not `getrusage`, whose peak is that of the process before it became this one, too.
        status = pathlib.Path("/proc/self/status").read_text()
        peak[f"{samples:.0e}"] = int(status.split("VmHWM:")[1].split()[0]) / 1024
    return peak


def random_layouts(number: int, seed: int = 0) -> list[list[str]]:
    """Overrides of the main job: random 1F1B and interleaved layouts of its GPUs."""
    rng = random.Random(seed)
    found: list[list[str]] = []
    while len(found) < number:
        tp, pp = rng.choice([1, 2, 4, 8]), rng.choice([2, 4, 8, 16])
        virtual = rng.choice([v for v in (1, 2, 3, 6, 12) if _LAYERS % (pp * v) == 0])
        sizes = {"layout.tp": tp, "layout.pp": pp, "layout.dp": _GPUS // (tp * pp)}
        sizes |= {"schedule.kind": "1f1b" if virtual == 1 else "interleaved-1f1b"}
        sizes |= {"schedule.virtual_stages": virtual}
        sizes |= {"schedule.num_microbatches": pp * rng.randint(1, 6)}
        found.append([f"{key}={value}" for key, value in sizes.items()])
    return found


def layouts(number: int = 100) -> dict[str, Any]:
    """How long other layouts of a job take, in a process that has compiled nothing yet."""
    options: dict[str, Any] = {"num_samples": 65_536, "key": jax.random.key(0)}

    def set_up(overrides: list[str]) -> float:
        start = time.perf_counter()
        program = compile_job(load_job(_JOB, overrides))
        graph = time.perf_counter() - start
        return graph + simulate(program, **options).compile_s

    first, second = set_up([]), set_up(["schedule.num_microbatches=8", "layout.dp=64"])
    start, ops = time.perf_counter(), 0
    for overrides in random_layouts(number):
        program = compile_job(load_job(_JOB, overrides))
        ops += program.num_ops
        simulate(program, **options)
    per_minute = 60 * number / (time.perf_counter() - start)
    found = {"compiled_s": first, "recompiled_s": second, "layouts_per_minute": per_minute}
    return found | {"ops_per_layout": ops / number}


def samples_per_s(stages: int, microbatches: int, replicas: int) -> float:
    """Of `simulate`, the best of two runs."""
    program = _with_engine.program(reference_graph(stages, microbatches), replicas)
    samples = min(1_000_000, 2**29 // program.num_ops)
    laws = [simulate(program, num_samples=samples, key=jax.random.key(k)) for k in range(3)]
    return max(law.num_samples / law.run_s for law in laws[1:])


def table() -> list[dict[str, float]]:
    """Samples per second, one thing changed at a time."""
    sizes = [(s, 32, 1) for s in (2, 4, 8, 16, 32)] + [(8, m, 1) for m in (8, 128, 512)]
    sizes += [(8, 32, r) for r in (64, 1024, 8192)]
    speeds = [(*one, jax.device_count(), samples_per_s(*one)) for one in sizes]
    speeds.append((8, 32, 1, 1, child("one device")))
    keys = ("stages", "microbatches", "replicas", "devices", "samples_per_s")
    return [dict(zip(keys, row, strict=True)) for row in speeds]


if __name__ == "__main__":
    main()

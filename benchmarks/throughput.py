"""How fast the engine is, beside NumPy, SimPy, mc_dagprop and its own random numbers.

    python benchmarks/throughput.py          # a report; --json for one JSON object
    python benchmarks/throughput.py --quick  # without the long runs (memory, table)

Everything is measured side by side in one run: after a warm-up, all programs take turns. A figure
is the median of its repeats (nine by default). A ratio is the median of the ratios of two programs
in the same repeat. Read the ratios: the other figures depend on the machine and its load. The
reference step is in `_graph.py`: 1F1B, 8 stages x 32 microbatches, 512 log-normal ops, sampling
included.

Keys of the JSON object:

- `samples_per_s`: the rate of `simulate`, without compilation. `core_samples_per_s`: the rate of
  samples of one replica on the devices, as the gradient is measured.
- `over_numpy`, `over_numpy_2`: speedup over NumPy with `Generator.standard_normal`, on one thread
  and in two processes. `..._box_muller`: speedup over NumPy with normals by the Box-Muller
  transform, which is faster.
- `over_simpy`, `over_mc_dagprop`: speedup over these libraries (one thread each, against all our
  cores), `null` where they are not installed. See `_with_mc_dagprop.py`.
- `draws_per_s`: the rate of the engine's draws, mapped to latencies and summed without a graph.
  `of_draw_limit`: the share of this rate that the core reaches. `simulate_of_draw_limit`: the share
  that `simulate` reaches.
- `gradient_over_forward`: time of the core's value with all derivatives over that of the value.
- `compile_s`: graph, XLA and eight samples, for interleaved 1F1B of 16 ranks x 8 virtual stages
  x 256 microbatches. `compile_s_by_microbatches`: the same for fewer microbatches.
- `compiled_s`, `recompiled_s`: set-up (graph and compilation) of the main job,
  `gpt3-175b-h100-4096`, in a new process, and of a second job in the same bucket of shapes.
  `layouts_per_minute`: 100 random 1F1B and interleaved layouts of the main job's GPUs, 65,536
  samples each, graph and set-up included; see `_layouts.py`.
- `replicas_ratio`: time of R = 8192 over R = 1 at 10^6 samples.
- `peak_rss_mib`: peak memory of a process after 10^6 and after 10^8 samples of R = 1024.
- `cold_s`, `warm_s`: time of the process `prism-jax simulate gpt3-175b-h100-4096 --samples 100000`,
  without and with compiled code in the cache; `warm_set_up_s`: the set-up of the second.
- `table`: samples per second against stages, microbatches, replicas and devices.
"""

import argparse
import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any


ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of the engine and its competitors.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="leave out the long runs")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--devices", type=int, default=os.cpu_count())
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    import jax

    from benchmarks import _layouts

    jax.config.update("jax_num_cpu_devices", arguments.devices)
    if arguments.child == "memory":
        print(json.dumps(memory()))
        return
    if arguments.child == "layouts":
        print(json.dumps(_layouts.measure()))
        return
    if arguments.child == "devices":
        print(json.dumps(samples_per_s(8, 32, 1)))
        return
    found = measure(arguments.repeats) | child("layouts", arguments.devices)
    if not arguments.quick:
        found["peak_rss_mib"] = child("memory", arguments.devices)
        found["table"] = table(arguments.devices)
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(
                f"{name:>28}: {value:.4g}" if isinstance(value, float) else f"{name:>28}: {value}"
            )


def measure(repeats: int) -> dict[str, Any]:
    """All figures of the reference step."""
    import jax

    from benchmarks import _with_numpy
    from benchmarks._graph import reference_graph

    graph = reference_graph()
    with _with_numpy.processes(graph) as pool:
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
        **compilation(),
        **whole_process(),
    }


def contestants_on(graph, pool) -> dict[str, tuple[int, Callable[[], Any]]]:
    """How many samples each takes at once, and how; without what is not installed."""
    import jax

    from benchmarks import _with_engine, _with_mc_dagprop, _with_numpy
    from prism_jax.engine import simulate

    key = jax.random.key(0)
    program, many = _with_engine.program(graph), _with_engine.program(graph, 8192)
    n, few = 1_000_000, 100_000
    contestants: dict[str, tuple[int, Callable[[], Any]]] = {
        "simulate": (n, lambda: simulate(program, num_samples=n, key=key)),
        "replicas": (n, lambda: simulate(many, num_samples=n, key=key)),
        "draws": (n, lambda: _with_engine.draws(program, n, key)),
        "core": (n, lambda: _with_engine.value(program, n, key)),
        "gradient": (n, lambda: _with_engine.value_and_gradient(program, n, key)),
        "numpy": (few, lambda: _with_numpy.makespans(graph, few, 0, box_muller=False)),
        "numpy_2": (
            few,
            lambda: _with_numpy.makespans_in(pool, 2, graph, few, 0, box_muller=False),
        ),
        "numpy_box_muller": (few, lambda: _with_numpy.makespans(graph, few, 0)),
        "numpy_2_box_muller": (few, lambda: _with_numpy.makespans_in(pool, 2, graph, few, 0)),
    }
    try:
        import simpy  # noqa: F401

        from benchmarks import _with_simpy

        contestants["simpy"] = (500, lambda: _with_simpy.makespans(graph, 500, 0))
    except ImportError:
        pass
    if _with_mc_dagprop.measure(graph, 20_000, 0) is not None:
        contestants["mc_dagprop"] = (20_000, lambda: _with_mc_dagprop.measure(graph, 20_000, 0))
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
            result = run()
            seconds = time.perf_counter() - start
            if name == "mc_dagprop":  # In a process of its own, which tells how long it took.
                seconds = result[1]
            found[name].append(seconds / count)
    return found


def compilation() -> dict[str, Any]:
    """Seconds from a schedule to the first samples of a program that is new to the process."""
    import jax
    import jax.numpy as jnp

    from benchmarks import _with_engine
    from prism_jax.replica import sample_replica_ends

    ids = jnp.arange(8, dtype=jnp.uint32)
    seconds = {}
    for microbatches in (32, 64, 128, 256):
        start = time.perf_counter()
        program = _with_engine.interleaved(16, 8, microbatches)
        sample_replica_ends(program, ids, jax.random.key(0)).block_until_ready()
        seconds[microbatches] = time.perf_counter() - start
    return {"compile_s": seconds[256], "compile_s_by_microbatches": seconds}


def whole_process() -> dict[str, float]:
    """Seconds of a whole process of the command line, medians of three."""
    command = [sys.executable, "-m", "prism_jax", "simulate", "gpt3-175b-h100-4096", "--json"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PRISM_JAX_CACHE": folder}

        def run(*more: str) -> tuple[float, float]:
            start = time.perf_counter()
            done = subprocess.run(
                [*command, "--samples", "100000", *more],
                cwd=ROOT,
                env=environment,
                check=True,
                capture_output=True,
            )
            return time.perf_counter() - start, json.loads(done.stdout)["compile_s"]

        cold = [run("--no-cache") for _ in range(3)]
        run()
        warm = [run() for _ in range(3)]
    return {
        "cold_s": statistics.median(seconds for seconds, _ in cold),
        "warm_s": statistics.median(seconds for seconds, _ in warm),
        "warm_set_up_s": statistics.median(set_up for _, set_up in warm),
    }


def child(what: str, devices: int) -> Any:
    """What this script prints in a process of its own."""
    command = [sys.executable, __file__, "--child", what, "--devices", str(devices)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def memory() -> dict[str, float]:
    """Peak resident memory after short and long runs, in MiB, on Linux."""
    import jax

    from benchmarks import _with_engine
    from benchmarks._graph import reference_graph
    from prism_jax.engine import simulate

    peak = {}
    program = _with_engine.program(reference_graph(), 1024)
    for samples in (1_000_000, 100_000_000):
        simulate(program, num_samples=samples, key=jax.random.key(0), sampling="plain")
        # Not `getrusage`, whose peak is that of the process before it became this one, too.
        status = pathlib.Path("/proc/self/status").read_text()
        peak[f"{samples:.0e}"] = int(status.split("VmHWM:")[1].split()[0]) / 1024
    return peak


def samples_per_s(stages: int, microbatches: int, replicas: int) -> float:
    """Of `simulate`, the best of two runs."""
    import jax

    from benchmarks import _with_engine
    from benchmarks._graph import reference_graph
    from prism_jax.engine import simulate

    program = _with_engine.program(reference_graph(stages, microbatches), replicas)
    samples = min(1_000_000, 2**29 // program.num_ops)
    laws = [simulate(program, num_samples=samples, key=jax.random.key(k)) for k in range(3)]
    return max(law.num_samples / law.run_s for law in laws[1:])


def table(devices: int) -> list[dict[str, float]]:
    """Samples per second, one thing changed at a time."""
    rows = []
    for stages, microbatches, replicas in (
        *((s, 32, 1) for s in (2, 4, 8, 16, 32)),
        *((8, m, 1) for m in (8, 128, 512)),
        *((8, 32, r) for r in (64, 1024, 8192)),
    ):
        speed = samples_per_s(stages, microbatches, replicas)
        row = {"stages": stages, "microbatches": microbatches, "replicas": replicas}
        rows.append({**row, "devices": devices, "samples_per_s": speed})
    row = {"stages": 8, "microbatches": 32, "replicas": 1, "devices": 1}
    rows.append({**row, "samples_per_s": child("devices", 1)})
    return rows


if __name__ == "__main__":
    main()

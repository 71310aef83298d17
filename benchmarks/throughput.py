"""How fast the engine is, beside NumPy, SimPy, mc_dagprop and its own random numbers.

    python benchmarks/throughput.py          # a report; --json for one JSON object

Everything is measured side by side in one run: after a warm-up, all programs take turns. A figure
is the median of its repeats (nine by default). A ratio is the median of the ratios of two programs
in the same repeat. Read the ratios: the other figures depend on the machine and its load. The
reference step is in `_baselines.py`: 1F1B, 8 stages x 32 microbatches, 512 log-normal ops, sampling
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
import pathlib
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from benchmarks import _baselines, _with_engine
from prism_jax import compile_job, load_job, sample_replica_ends, schedules, simulate
from tests.helpers import pipeline_program
from validation.tables import Row, machine, options, use_all_cores


_JOB, _GPUS, _LAYERS = "gpt3-175b-h100-4096", 4096, 96


def main() -> None:
    of_one = ft.partial(samples_per_s, 8, 32, 1)
    children: Any = {"memory": memory, "layouts": layouts, "one device": of_one}
    known: Any = {"json": (False, "print one JSON object"), "repeats": (9, "of each program (9)")}
    known["child"] = {"choices": children, "help": argparse.SUPPRESS}
    given = options(__doc__, **known)
    if given.child != "one device":
        use_all_cores()
    if given.child:
        print(json.dumps(children[given.child]()))
        return
    found = measure(given.repeats) | child("layouts")
    found |= {"peak_rss_mib": child("memory"), "table": table()}
    if given.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:>28}: {value:.4g}" if isinstance(value, float) else f"{name:>28}: {value}")


def measure(repeats: int) -> Row:
    """All figures of the reference step."""
    graph = _baselines.reference_graph()
    # Its processes begin with the run that does not count.
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        per_sample = seconds_per_sample(contestants_on(graph, pool), repeats)

    def per_s(name: str) -> float:
        return 1 / statistics.median(per_sample[name])

    def ratio(name: str, base: str) -> float | None:
        """Of the time of a contestant over that of another, in the same repeat."""
        pairs = zip(per_sample.get(name, ()), per_sample[base], strict=False)
        return statistics.median(found) if (found := [a / b for a, b in pairs]) else None

    found: Row = {"device": str(jax.devices()[0].device_kind), "devices": len(jax.devices())}
    found |= {**machine(), "jax": jax.__version__}
    found |= {"samples_per_s": per_s("simulate"), "core_samples_per_s": per_s("core")}
    others = ("simpy", "mc_dagprop", *(name for name in per_sample if name.startswith("numpy")))
    found |= {f"over_{name}": ratio(name, "simulate") for name in others}
    for name, one in (("numpy_draws_per_s", "numpy"), ("draws_per_s", "draws")):
        found[name] = graph.num_ops * per_s(one)
    pairs = {"of_draw_limit": ("draws", "core"), "simulate_of_draw_limit": ("draws", "simulate")}
    pairs["gradient_over_forward"] = ("gradient", "core")
    pairs["replicas_ratio"] = ("replicas", "simulate")
    return found | {n: ratio(*one) for n, one in pairs.items()} | {"compile_s": compilation()}


def contestants_on(graph, pool) -> dict[str, tuple[int, Any]]:
    """How many samples each takes at once, and how; without what is not installed."""
    key = jax.random.key(0)
    n, few = 1_000_000, 100_000
    ours: Any = {"draws": _with_engine.draws, "core": _with_engine.value}
    ours["gradient"] = _with_engine.value_and_gradient
    programs = {"simulate": _with_engine.program(graph)}
    programs["replicas"] = _with_engine.program(graph, 8192)
    call: Any = ft.partial
    found = {name: (n, call(run, programs["simulate"], n, key)) for name, run in ours.items()}
    for name, program in programs.items():
        found[name] = n, call(simulate, program, num_samples=n, key=key)
    alone = call(_baselines.makespans, graph, few, 0)
    in_two = call(_baselines.makespans_in, pool, graph, few, 0)
    for name, run in (("numpy", alone), ("numpy_2", in_two)):
        found |= {name: (few, call(run, box_muller=False)), f"{name}_box_muller": (few, run)}
    for name, count in (("simpy", 500), ("mc_dagprop", 20_000)):
        if importlib.util.find_spec(name):
            found[name] = count, call(getattr(_baselines, f"by_{name}"), graph, count, 0)
    return found


def seconds_per_sample(contestants: dict[str, Any], repeats: int) -> dict[str, list[float]]:
    """Of each contestant in each repeat, after one that is not counted."""
    for _, run in contestants.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats):
        # In another order each time, for what ran before leaves caches and memory its way.
        for name in random.Random(repeat).sample(sorted(contestants), len(contestants)):
            count, run = contestants[name]
            found[name].append(_seconds(run) / count)
    return found


def _seconds(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compilation() -> float:
    """Seconds from a schedule to the first samples of a program that is new to the process."""
    ids, key = jnp.arange(8, dtype=jnp.uint32), jax.random.key(0)

    def sample() -> None:
        program = pipeline_program(schedules.InterleavedOneFOneB(16, 256, 8))
        sample_replica_ends(program, ids, key).block_until_ready()

    return _seconds(sample)


def child(what: str) -> Any:
    """What this script prints in a process of its own."""
    command = [sys.executable, __file__, "--child", what]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def memory() -> dict[str, float]:
    """Peak resident memory after short and long runs, in MiB, on Linux."""
    peak = {}
    program = _with_engine.program(_baselines.reference_graph(), 1024)
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
        words = [f"layout.tp={tp}", f"layout.pp={pp}", f"layout.dp={_GPUS // (tp * pp)}"]
        kind = "1f1b" if virtual == 1 else "interleaved-1f1b"
        words += [f"schedule.kind={kind}", f"schedule.virtual_stages={virtual}"]
        found.append([*words, f"schedule.num_microbatches={pp * rng.randint(1, 6)}"])
    return found


def layouts(number: int = 100) -> Row:
    """How long other layouts of a job take, in a process that has compiled nothing yet."""

    def set_up(overrides: list[str]) -> tuple[float, int]:
        """Seconds of graph and compilation, and the number of ops."""
        start = time.perf_counter()
        program = compile_job(load_job(_JOB, overrides))
        graph = time.perf_counter() - start
        law = simulate(program, num_samples=65_536, key=jax.random.key(0))
        return graph + law.compile_s, program.num_ops

    first, second = set_up([]), set_up(["schedule.num_microbatches=8", "layout.dp=64"])
    start = time.perf_counter()
    ops = sum(set_up(overrides)[1] for overrides in random_layouts(number))
    per_minute = 60 * number / (time.perf_counter() - start)
    found = {"compiled_s": first[0], "recompiled_s": second[0], "layouts_per_minute": per_minute}
    return found | {"ops_per_layout": ops / number}


def samples_per_s(stages: int, microbatches: int, replicas: int) -> float:
    """Of `simulate`, the best of two runs."""
    program = _with_engine.program(_baselines.reference_graph(stages, microbatches), replicas)
    samples = min(1_000_000, 2**29 // program.num_ops)
    laws = [simulate(program, num_samples=samples, key=jax.random.key(k)) for k in range(3)]
    return max(law.num_samples / law.run_s for law in laws[1:])


def table() -> list[dict[str, float]]:
    """Samples per second, one thing changed at a time."""
    sizes = [*((s, 32, 1) for s in (2, 4, 8, 16, 32)), *((8, m, 1) for m in (8, 128, 512))]
    sizes += [(8, 32, r) for r in (64, 1024, 8192)]
    speeds = [(*one, jax.device_count(), samples_per_s(*one)) for one in sizes]
    speeds.append((8, 32, 1, 1, child("one device")))
    keys = ("stages", "microbatches", "replicas", "devices", "samples_per_s")
    return [dict(zip(keys, row, strict=True)) for row in speeds]


if __name__ == "__main__":
    main()

"""Compiles what runs in tiles for a device that is not there: python tools/compile_for.py h200

The devices are h200, h100 and v5e. For each function of some jobs: of how many samples a tile is,
and how many tiles run side by side, by what the engine asks the compiler; their memory, and what
the engine allows them; how many kernels are launched, how many loops the host launches turn by turn
because they are in no CUDA graph, and how many kernels a turn launches of a loop that has no other
in it; how often such a turn copies as much as the ends of the tiles; the most bytes that a thread
spills; and of the kernels of this package how many registers a thread has, and instructions (PTX)
the longest loop that has no other in it. It fails where a turn copies the ends, tiles need more
than they may, a kernel of this package spills, or another spills more than 64 bytes.
"""

import argparse
import importlib.util
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any


_ROOT = pathlib.Path(__file__).resolve().parents[1]
PLUGINS = _ROOT / ".venv-accelerators"  # See the Makefile.
_COLUMNS = (
    "job",
    "function",
    "samples",
    "tiles",
    "MiB",
    "allowed",
    "launches",
    "by the host",
    "in a turn",
    "copies",
)
_COLUMNS += ("spills", "kernels", "seconds", "problem")

_JOBS = ("gpt3-175b-h100-4096", "deepseek-v3-h800-2048", "megatron-22b-a100-8")
# Bytes of memory, and bytes a second, by NVIDIA's data sheets.
_GPUS = {
    "h200": ("NVIDIA H200 141GB HBM3e", 151_397_597_184, 4_800_000_000_000),
    "h100": ("NVIDIA H100 80GB HBM3", 84_942_979_072, 3_352_320_000_000),
}
_TPU_MEMORY = 16_911_433_728  # 15.75 GiB of a v5e.
_NO_SPILLS = "xla_gpu_fail_ptx_compilation_on_register_spilling"
_SPILL = 64  # Bytes a thread: kernels of XLA spill a few.
_KERNELS = ("propagate", "along_path")  # Of this package: they spill nothing.
_PREALLOCATED = 0.75  # Of a GPU's memory, by JAX.
# What XLA must know of a GPU to compile for it: units and operations a clock of each dtype.
_RATES = ((4, 64, 1), (8, 64, 1), (10, 128, 2), (11, 128, 1), (12, 64, 1), (16, 128, 2))
_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {bandwidth} l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: {memory} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  scalar_unit_description {{ {rates} }}
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a"
  model_str: "sm_9.0a" device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true
  name: "{name}" driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}"
"""
# Instructions of a compiled program that a device launches.
_LAUNCHED = re.compile(r"= .*?\b(fusion|custom-call|copy|scatter|sort|reduce|select-and-scatter)\(")
_COPY = re.compile(r"= \w+?(\d+)\[([\d,]*)\]\S* copy\(")


def main() -> None:
    """Prints a table in Markdown, or rows as JSON; the exit code is 1 where a row fails."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("target", choices=(*_GPUS, "v5e"))
    parser.add_argument("--jobs", nargs="+", default=_JOBS, help="names of job files")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args()
    prepare_jax()
    from validation.tables import line, table

    def line_of(row: dict[str, Any]) -> str:
        values = [row.get(name, "") for name in _COLUMNS]
        return line(f"{x:,.1f}" if isinstance(x, float) else x for x in values)

    rows = []
    if not args.json:
        print(table(_COLUMNS, ()))
    for job in args.jobs:
        for row in compiled_rows(args.target, job):
            rows.append(row)
            if not args.json:
                print(line_of(row), flush=True)
    if args.json:
        print(json.dumps(rows, indent=1))
    sys.exit(any(row["problem"] for row in rows))


def prepare_jax() -> None:
    """Finds the plugins, and sets what JAX reads as it is imported."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    os.environ["TPU_LIBRARY_PATH"] = str(PLUGINS / "libtpu" / "libtpu.so")
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --{_NO_SPILLS}=true"
    os.environ["PATH"] = f"{PLUGINS / 'nvidia/cu13/bin'}:{os.environ['PATH']}"  # With `ptxas`.
    sys.path[:0] = str(PLUGINS), str(_ROOT)


def device_for(target: str) -> tuple[str, Any, int]:
    """The platform of a target, a device for which XLA compiles, and the memory that JAX takes."""
    import jax.experimental.topologies as topologies

    needed = "libtpu" if target == "v5e" else "jax_plugins"
    if importlib.util.find_spec(needed) is None:
        sys.exit(f"{PLUGINS.name} has no {needed}; run `make {PLUGINS.name}` first.")
    if target == "v5e":
        topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
        return "tpu", topology.devices[0], _TPU_MEMORY
    name, memory, bandwidth = _GPUS[target]
    rates = "".join(
        f"rate_infos {{ key: {key} value {{ clock_rate_ghz: 1.98 units_per_core: {units} "
        f"ops_per_clock: {ops} }} }} "
        for key, units, ops in _RATES
    )
    spec = _HOPPER.format(name=name, memory=memory, bandwidth=bandwidth, rates=rates)
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=spec)
    return "cuda", topology.devices[0], int(_PREALLOCATED * memory)


def compiled_rows(target: str, job: str) -> Iterator[dict[str, Any]]:
    """A row for each function that runs in tiles."""
    import numpy as np
    from jax.sharding import Mesh

    from prism_jax import _devices, compile_job, load_job
    from prism_jax.maxplus import _propagate
    from prism_jax.replica import TILE, _tiles
    from tests.test_backends import tiled_functions, traced_tiles

    platform, device, memory = device_for(target)
    functions = tiled_functions(compile_job(load_job(job)))
    here = _devices.platform, _propagate.on_hopper, _tiles._mesh
    # From here on as if the device were there.
    _devices.platform = lambda: {"cuda": "gpu"}.get(platform, platform)
    _propagate.on_hopper = lambda: platform == "cuda"
    _tiles._mesh = lambda: Mesh(np.array([device]), ("tiles",))
    _tiles._memory = lambda: memory
    try:
        for function, (shared, *of_sample) in functions.items():
            levels = getattr(shared[0].structure.replica, "levels", None)
            slots = 0 if levels is None else levels.num_slots
            # Short sums of derivatives take small tiles.
            small = [_tiles._SMALL_TILE] if function.__name__.endswith("_vjp") else []
            for size in (TILE, *small):

                def lowered(tiles, run=function, shared=shared, of_sample=of_sample, size=size):
                    traced = traced_tiles(run, shared, of_sample, tiles=tiles, size=size)
                    return traced.lower(lowering_platforms=(platform,))

                row = {"target": target, "job": job, "function": function.__name__}
                row |= {"samples": size}
                yield row | compiled_row(lowered, platform, memory, 4 * size * slots)
    finally:
        _devices.platform, _propagate.on_hopper, _tiles._mesh = here


def compiled_row(lowered, platform: str, memory: int, ends: int) -> dict[str, Any]:
    """The figures of a function.

    **Arguments:**

    - `lowered`: lowers so many tiles side by side.
    - `platform`, `memory`: of the device; in bytes.
    - `ends`: the bytes of the ends of a tile that are held.
    """
    import jax

    from prism_jax.replica import _tiles

    start, tiles, room = time.perf_counter(), _tiles._MOST_WIDE_TILES, 0
    spills: dict[str, int] = {}
    by_host, kernels = 0, ""

    def compile_tiles():
        nonlocal by_host, kernels
        with tempfile.TemporaryDirectory() as folder:
            # That for TPUs would take minutes to write.
            options: dict[str, Any] = {"xla_dump_to": folder} if platform == "cuda" else {}
            try:
                compiled = lowered(tiles).compile(compiler_options=options)
            except jax.errors.JaxRuntimeError as error:
                if "register spilling" not in str(error):
                    raise
                options[_NO_SPILLS] = False
                compiled = lowered(tiles).compile(compiler_options=options)
                spills.update(spilled_bytes(pathlib.Path(folder)))
            by_host = loops_of_host(pathlib.Path(folder))
            kernels = "; ".join(sizes_of_kernels(pathlib.Path(folder)))
        return compiled

    while tiles != room:
        room = tiles
        tiles = _tiles.fitting_tiles(lambda: SimpleNamespace(compile=compile_tiles), room)
    compiled = compile_tiles()
    held, allowed = _tiles.held_bytes(compiled), _tiles._SHARE_OF_MEMORY * memory
    row = {"tiles": tiles, "MiB": held / 2**20, "allowed": allowed / 2**20}
    row |= counts(compiled.as_text(), tiles * ends) | {"by the host": by_host}
    row |= {"spills": max(spills.values(), default=0), "kernels": kernels}
    row |= {"seconds": time.perf_counter() - start}
    problems = [f"{row['copies']} copies of the ends in a turn"] if row["copies"] else []
    problems += ["more memory than is allowed"] if held > allowed else []
    limits = {name: 0 if name in _KERNELS else _SPILL for name in spills}
    problems += [f"{k} spills {n} bytes" for k, n in spills.items() if n > limits[k]]
    return row | {"problem": "; ".join(problems)}


def spilled_bytes(folder: pathlib.Path) -> dict[str, int]:
    """By kernel, the bytes that a thread spills, of what XLA left in a folder."""
    spills = {}
    # That of a program's constants is empty where it has none.
    for file in (file for file in folder.glob("*.ptx") if file.stat().st_size):
        pairs = re.findall(r"properties for (\S+)\n.*?(\d+) bytes spill stores", _assembled(file))
        spills |= {name: int(number) for name, number in pairs if int(number)}
    return spills


def sizes_of_kernels(folder: pathlib.Path) -> list[str]:
    """Of each kernel of this package among what XLA left in a folder, how many registers a thread
    has, and instructions the longest loop that has no other in it.
    """
    sizes = set()  # XLA leaves what it compiles twice two times.
    for file in folder.glob("*.ptx"):
        text = file.read_text()
        for name in (name for name in _KERNELS if f".entry {name}(" in text):
            registers = re.search(rf"properties for {name}\n.*?Used (\d+)", _assembled(file), re.S)
            assert registers is not None
            sizes.add(f"{name} {registers[1]} registers, {longest_turn(text, name)} a turn")
    return sorted(sizes)


def _assembled(file: pathlib.Path) -> str:
    """What `ptxas` says of some PTX."""
    command = ["ptxas", "-arch=sm_90a", "-v", "-o", os.devnull, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def longest_turn(text: str, name: str) -> int:
    """How many instructions the longest loop of a kernel has that has no other in it."""
    from tests.ptx import lines_of

    starts: dict[str, int] = {}
    number, longest, latest = 0, 0, -1  # The latest start of a loop that has ended.
    for line in lines_of(text, name):
        if label := re.match(r"\$(\w+):", line):
            starts[label[1]] = number
        elif not line.startswith("."):
            number += 1
            jump = re.search(r"\bbra\S* \$(\w+)", line)
            start = starts.get(jump[1], number) if jump else number  # Of a loop, if it goes back.
            if latest < start < number:
                longest = max(longest, number - start)
            latest = max(latest, start) if start < number else latest
    return longest


def loops_of_host(folder: pathlib.Path) -> int:
    """How many loops the host launches turn by turn, because they are in no CUDA graph, by what XLA
    left in a folder; zero where it leaves nothing.
    """
    number = 0
    for file in folder.glob("*thunk_sequence_after_thunk_passes.txt"):
        in_graph = math.inf  # The indentation of the graph that a line is in.
        for indent, what in re.findall(r"^( *)\d+: k(\w+)", file.read_text(), re.M):
            if len(indent) <= in_graph:
                in_graph = len(indent) if what == "CommandBuffer" else math.inf
                number += what == "While"
    return number


def counts(text: str, ends: int) -> dict[str, int]:
    """What is launched once, and at most in a turn of a loop without loops in it; and how many
    copies of so many bytes such turns have: of a compiled program's text.
    """
    blocks = dict(re.findall(r"^(?:ENTRY )?%?([\w.-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S))
    entry = re.findall(r"^ENTRY %?([\w.-]+) ", text, re.M)
    loops = re.findall(r"condition=%?([\w.-]+), body=%?([\w.-]+)", text)
    turns = [blocks[c] + blocks[body] for c, body in loops if " while(" not in blocks[body]]
    launched = [len(_LAUNCHED.findall(turn)) for turn in turns]
    copies = [copy for turn in turns for copy in _COPY.findall(turn)]
    return {
        "launches": sum(len(_LAUNCHED.findall(blocks[name])) for name in entry),
        "in a turn": max(launched, default=0),
        "copies": sum(0 < ends <= _bytes(*copy) for copy in copies),
    }


def _bytes(bits: str, shape: str) -> int:
    number = int(bits) // 8
    for size in filter(None, shape.split(",")):
        number *= int(size)
    return number


if __name__ == "__main__":
    main()

"""Peaks of memory that runs reported, and whether runs fitted, against `prism_jax.memory`.

What a framework's allocator held at most is compared with `RankMemory.bytes`. torchtitan prints
what it has reserved of the device (`max_reserved` of torch's allocator), which is more by what is
fragmented. A run that ended with a step fits, whatever else is known of it.

`plain_h200/` is read elsewhere: jobs do not yet have what plain PyTorch keeps.
"""

import functools as ft
import json
import pathlib
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from prism_jax import data
from prism_jax.data import load_job, make_job
from prism_jax.importers._frameworks import megatron_reader
from prism_jax.importers._megatron import read_megatron
from prism_jax.prediction import Memory, memory

from .published import BYTES_OF_UNITS, published
from .published_models import device_of
from .rows import WORDS, attempt, count, job_of, number, read
from .searches import ENDED, NOT_OF_MEMORY, layout_of, name_of_layout
from .tables import Folder, Row, Rows, by, error_of


# Runs of which the parameters are sharded, layers are in 8 bits or less, or what is kept for a
# backward is offloaded or computed again op by op.
_SHARDED = "fsdp, fp8, offloaded, by op"
_NEAR = 0.20
_NOWHERE = pathlib.Path("a row")


def memory_rows(folder: Folder) -> dict[str, list[Any]]:
    """The runs below a folder like `../shared/data`.

    **Returns:**

    `rows` have a `table`, a `name` and a `device`; the `measured` peak in bytes, `None` if it is
    not known; the `predicted` one; whether the run `ran`, `None` if that is not known; and whether
    it `fits`, `None` if the memory of its device is not known. `refused` are the runs that cannot
    be expressed as a job, each with the `reason`, and `tables_of_megatron` the tables of
    Megatron-LM's tests.
    """
    golden = list(golden_rows(folder / "megatron_golden"))
    rows = [
        *golden,
        *_published(folder),
        *_layouts(folder / "steps"),
        *_sailor(folder / "steps"),
        *_cases(folder.parent / "cases"),
    ]
    refused = [row for row in rows if "reason" in row]
    tables = list(dict.fromkeys(row["table"] for row in golden))
    rows = [row for row in rows if "reason" not in row]
    return {"rows": rows, "refused": refused, "tables_of_megatron": tables}


def memory_table(found: dict[str, list[Any]]) -> str:
    """A line for each peak, each run on the wrong side, each reason, each table and all."""
    rows, refused = found["rows"], found["refused"]
    if not rows:
        return "no runs that can be expressed"
    peaks = [row for row in rows if row["measured"]]
    form = "{error:+7.1%} {gb:8.2f} GB  {name} {device}"
    lines = [form.format(**row, error=error_of(row), gb=row["measured"] / 1e9) for row in peaks]
    known = [row for row in rows if None not in (row["ran"], row["fits"])]
    form = "{} fits, ran {}: {gb:8.2f} GB  {table}: {name} {device}"
    lines += [
        form.format(*("does", "out") if row["fits"] else ("not", "well"), **row, gb=_gb(row))
        for row in known
        if row["ran"] != row["fits"]
    ]
    reasons = by("reason", refused)
    lines += [f"refused, {len(some)} rows: {reason}" for reason, some in reasons.items()]
    of_golden = [row for row in peaks if row["table"] in found["tables_of_megatron"]]
    tables = by("table", peaks) | {"all of Megatron-LM": of_golden, "all": peaks}
    for name, some in tables.items():
        errors = [abs(error_of(row)) for row in some]
        if errors:
            near = sum(error <= _NEAR for error in errors) / len(errors)
            middle = f"median error {statistics.median(errors):.1%}, {near:.0%} within {_NEAR:.0%}"
            lines.append(f"{name:28} {len(some):4} rows: {middle}")
    total = len(rows) + len(refused)
    lines.append(f"expressed {len(rows):,} of {total:,} rows ({len(rows) / total:.0%})")
    for what, ran in (("false refusals", True), ("false fits", False)):
        those = [row for row in known if row["ran"] == ran]
        wrong = sum(row["fits"] != ran for row in those)
        share = f" ({wrong / len(those):.1%})" if those else ""
        ended = "ran" if ran else "ran out of memory"
        lines.append(f"{what}: {wrong:,} of {len(those):,} runs that {ended}{share}")
    return "\n".join(lines)


def _gb(row: Row) -> float:
    return row["predicted"] / 1e9


def _row(table: str, name: str, device: str, job: Any, **known: Any) -> Row:
    """A row of a job; `known` are its peak `measured` and by what (`of`), and whether it `ran`."""
    row: Row = {"table": table, "name": name, "device": device}
    found, reason = attempt(memory, job) if job else (None, known.pop("reason"))
    if not found:
        return row | {"reason": reason}
    predicted = _as_counted(found, known.get("of", ""), job.training.zero)
    row |= {"measured": known.get("measured"), "predicted": predicted}
    return row | {"ran": known.get("ran"), "fits": found.fits}


# What the allocator has reserved beyond what is allocated, where there is room. Megatron-LM makes
# its buffers before all else; PyTorch makes gradients and moments between activations. The median
# of the eight runs in `plain_h200/steps.csv`.
_PLAIN = 0.08


def _as_counted(found: Memory, of: str, zero: int) -> float:
    """The peak of a job as it is counted: what is allocated; what the `allocator` has reserved for
    it; or what the `driver` counts, with the context of CUDA and the buffers of NCCL.
    """
    held = dict(found.reserved)
    share = held.pop("fragmentation") / found.usable_bytes
    share = _PLAIN if zero == 3 else share
    reserved = found.fullest.bytes * (1 + share * (of != ""))
    return reserved + sum(held.values()) * (of == "driver")


# A node of Megatron-LM's functional tests. Where a recipe does not state its GPUs, it has at least
# as many nodes as its degrees need, and up to so many times as many.
_NODE_OF_TESTS, _MOST_TIMES = 8, 32
_STATES = ("parameters", "gradients", "optimizer", "libraries")


def golden_rows(folder: Folder) -> Rows:
    """The functional tests of Megatron-LM: its allocator on the last rank, which logs."""
    for row in read(folder / "memory.csv"):
        one: Row = {"table": row["group"], "name": row["case"], "device": row["device"]}
        measured = number(row["mem_max_allocated_bytes"])
        found, reason = attempt(_golden_memory, row)
        if found and measured:
            peak = found.ranks[-1].bytes
            yield one | {"measured": measured, "predicted": peak, "ran": True, "fits": found.fits}
        else:
            reason = reason.removeprefix(f"{row['case']}: ")
            yield one | {"reason": reason or "no peak of memory"}


def _golden_memory(row: dict[str, str]) -> Memory:
    """The memory of a test. Where its GPUs are not stated, the states of its parameters, which are
    sharded over them, are nearest to what was allocated after a step.

    **Raises:**

    A `ValueError` if less was allocated then than parameters and gradients take, so that it is of
    other arguments.
    """
    arguments = dict(json.loads(row["args"]))
    if "img-h" in arguments:
        raise ValueError("the language model is imported without its tower of images")
    if arguments.get("use-megatron-fsdp"):
        # The rows have no paths, and with `data-path` they lost this one; the tests shard all.
        strategy = {"data-parallel-sharding-strategy": "optim_grads_params"}
        arguments = strategy | arguments
    allocated = number(row["mem_allocated_bytes"])
    # Of the machine nothing but the memory of a device matters here, and that there is room.
    machine = {"cluster": WORDS["clusters"].get(device_of(row["device"]), "dgx-h100")}
    machine |= {"num_nodes": 8192}

    def memory_on(gpus: int) -> Memory:
        raw = read_megatron(megatron_reader(arguments), gpus)
        raw["training"]["software"] = "megatron-core-2024"
        return memory(make_job(raw | machine, pathlib.Path(row["case"])))

    def states(found: Memory, names: tuple[str, ...] = _STATES) -> float:
        return sum(found.ranks[-1].parts.get(name, 0.0) for name in names)

    gpus, sharded = count(row, "gpus", _least_gpus(arguments)), "use-distributed-optimizer"
    found = memory_on(gpus)
    if allocated and not row["gpus"] and arguments.get(sharded):
        times = 2
        # More GPUs only take away from the states.
        while states(found) > allocated and times <= _MOST_TIMES:
            more, _ = attempt(memory_on, gpus * times)
            if not more or abs(states(more) - allocated) > abs(states(found) - allocated):
                break
            found, times = more, times * 2
    if allocated and allocated < (held := states(found, _STATES[:2])):
        text = f"{allocated / 1e9:.2f} GB after a step, and {held / 1e9:.2f} GB"
        raise ValueError(f"recorded with other arguments: {text} of parameters and gradients")
    return found


def _least_gpus(arguments: dict) -> int:
    """Of the whole nodes that hold a pipeline of whole stages."""
    kinds = ("tensor-model", "pipeline-model", "context", "expert-model")
    tp, pp, cp, ep = (int(arguments.get(f"{kind}-parallel-size", 1)) for kind in kinds)
    etp = int(arguments.get("expert-tensor-parallel-size", tp))
    return -(-pp * max(tp * cp, ep * etp) // _NODE_OF_TESTS) * _NODE_OF_TESTS


def _published(folder: Folder) -> Rows:
    """The steps of `validation/published.py`, all of which ran; notes of some have their peaks."""
    for one in published(folder):
        of = "allocator" if one.reserved else ""
        keys = {"measured": one.peak_bytes or None, "of": of, "ran": True}
        table = _SHARDED if one.job and _is_sharded(one.job.training) else one.table
        yield _row(table, one.name, one.device, one.job, reason=one.reason, **keys)


def _is_sharded(training: Any) -> bool:
    narrow = training.dtype not in ("bf16", "fp16")
    again = training.recompute == "by-op"
    return training.zero == 3 or narrow or again or bool(training.offload)


_LAYOUT = ("framework", "gpus", "tp", "dp", "pp", "ep", "zero", "seq")


def _layouts(folder: Folder) -> Rows:
    """Layouts that were tried on A100 of 40 GB, of which some failed.

    The causes are cut in the source. A failure is taken to be one of memory if the states of the
    parameters alone are more than the card has, or if the same layout ran with a smaller
    microbatch, and never with as many sequences; of all others, such as pipelines of torchtitan
    that never ran with 8 GB of states, it is not known.
    """
    rows = read(folder / "layouts_a100.csv")
    sizes = defaultdict(list)
    for row in rows:
        if ENDED.get(row["ran"].lower()):
            sizes[tuple(row[key] for key in _LAYOUT)].append(number(row["micro_batch"]) or 0)
    for row in rows:
        ran = ENDED.get(row["ran"].lower())
        own, size = sizes[tuple(row[key] for key in _LAYOUT)], number(row["micro_batch"])
        if ran is False:
            too_much = (number(row["state_bytes_per_gpu"]) or 0) > _bytes_of(row["device"])
            grew = size and own and min(own) < size and max(own) < size
            other = row["configuration_fault"] or row["failure"] in NOT_OF_MEMORY
            ran = False if (too_much or grew) and not other else None
        job, reason = attempt(job_of, layout_of, row)
        name = f"{name_of_layout(row)}, {row['search']}"
        yield _row("layouts, A100 of 40 GB", name, row["device"], job, ran=ran, reason=reason)


@ft.cache
def _bytes_of(device: str) -> float:
    """The memory of a device, without limit if it is not known."""
    known = device_of(device)
    return data.load_device(known).memory_bytes if known else float("inf")


# Of Sailor's runs (sailor@cf2c8e3): their peaks are those that nvidia-smi printed. The DeepSpeed
# configuration names no dtype, so they are in float32, with unfused attention and no dropout.
_OPT = {"hidden_size": 1024, "num_heads": 16, "vocab_size": 50272, "num_layers": 24}
_OPT |= {"ffn_size": 4096, "max_positions": 2048, "dropout": False}


def _sailor(folder: Folder) -> Rows:
    """Sailor's runs of OPT-350M on GH200, and on mixed GPUs, whose memory is not known here."""
    for row in read(folder / "more_memory.csv"):
        job, reason = attempt(_of_sailor, row)
        measured = number(row["max_memory_bytes"])
        degrees = " ".join(f"{key}{row[key]}" for key in ("tp", "pp", "dp"))
        name = f"{row['model']} {degrees} batch {row['micro_batch']}"
        keys = {"measured": measured, "of": "driver", "ran": True, "reason": reason}
        one = _row("Sailor, assumed: float32, unfused", name, row["gpu_type"], job, **keys)
        yield one | ({} if "reason" in one or "GH200" in row["gpu_type"] else {"fits": None})


def _of_sailor(row: dict[str, str]) -> data.Job:
    if row["model"] != "OPT-350M":
        raise ValueError(f"the layers of {row['model']} are not known here")
    tp, pp, dp = (count(row, key) for key in ("tp", "pp", "dp"))
    # The embedding and the head count as layers.
    first, *others = (int(text) for text in row["layers_per_stage"].split())
    stages = [first - 1, *others]
    stages[-1] -= 1
    if len(stages) != pp or sum(stages) != _OPT["num_layers"]:
        raise ValueError(f"`layers_per_stage` {row['layers_per_stage']} are not those of 24 layers")
    size = count(row, "micro_batch")
    microbatches = count(row, "global_batch") // (dp * size)
    schedule: dict[str, Any] = {"kind": "1f1b", "num_microbatches": microbatches}
    if len(set(stages)) > 1:
        schedule["layers_per_stage"] = stages
    training = {"microbatch_size": size, "sequence_length": count(row, "seq"), "dtype": "tf32"}
    training |= {"software": "megatron-2021", "sequence_parallel": False, "zero": 0}
    training |= {"attention": "unfused"}
    raw = {"model": _OPT, "layout": {"tp": tp, "pp": pp, "dp": dp}}
    raw |= {"schedule": schedule, "training": training, "cluster": "hgx-h100-96g"}
    return make_job(raw | {"num_nodes": -(-tp * pp * dp // 8)}, _NOWHERE)


_NUMBERS = {"two": 2, "four": 4, "eight": 8, "16": 16, "32": 32}


def _cases(folder: Folder) -> Iterator[Row]:
    """Job files whose first line says what the run measured: `# ran: 4.37 s, 87.9 GB reserved`."""
    for path in sorted(folder.glob("c*.toml")):
        first = path.read_text().partition("\n")[0]
        if not (said := re.match(r"#\s*(ran( out of memory)?\b[^:]*)(:.*)?", first)):
            continue
        peak = re.search(r"(\d+(?:\.\d+)?) (Gi?B)", said[3] or "")
        measured = float(peak[1]) * BYTES_OF_UNITS[peak[2]] if peak else None
        chunks = re.search(rf"loss in ({'|'.join(_NUMBERS)}) chunks", first)
        more = [f"training.loss_chunks={_NUMBERS[chunks[1]]}"] if chunks else []
        job, reason = attempt(load_job, path, more)
        device = job.cluster.device.name if job else ""
        table = _SHARDED if job and _is_sharded(job.training) else "cases"
        keys = {"measured": measured, "of": "allocator", "ran": not said[2], "reason": reason}
        yield _row(table, path.stem, device, job, **keys)

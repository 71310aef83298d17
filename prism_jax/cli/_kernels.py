"""Kernels: the shipped profiles, those of this machine, and measured ones as laws by shape."""

import datetime
import os
import time
from collections import Counter
from typing import Any

import msgspec
import numpy as np

import prism_jax as prism

from .. import data
from .._files import shown
from .._installed import needed
from .._misc import plural, quoted
from .._summary import GIB, Column, Table, plain
from . import _load
from ._options import Args, Output, command
from ._outputs import Writes


_FILES = ("shapes.csv", "source.toml")
_SECONDS, _QUICK = 600.0, 60.0
_MOST_TEXT = 2**24  # Of what a benchmark prints.


@command()
def kernels(args: Args) -> Output:
    """List the shipped kernel profiles, with their sources.

    --variability  how much kernels vary, with sources

    example: prism-jax kernels --variability
    """
    if args.variability:
        return _variability()
    sources = [data.load_source(name) for name in data.list_names("profile of kernels")]
    stacks = [data.load_software(name) for name in data.list_names("software stack")]
    blocks = []
    for source in sources:
        lines = [f"{source.name}: {source.who}, {source.when}; {source.licence}"]
        lines += [f"  chosen: {c.name} = {c.value}: {c.reason}" for c in source.constants]
        blocks.append("\n".join(lines))
    for stack in stacks:
        switches = (f"  {key} = {value}" for key, value in stack.training.items())
        blocks.append("\n".join([f"software {stack.name}: {stack.source}", *switches]))
    return Output(msgspec.to_builtins({"kernels": sources, "software": stacks}), *blocks)


def _variability() -> Output:
    """The laws of all profiles as a table, and below it their numbered sources."""
    of_profiles = {
        name: data.load_variability(name) for name in data.list_names("profile of kernels")
    }
    laws = [law for of_profile in of_profiles.values() for law in of_profile]
    sources = list(dict.fromkeys(law.source for law in laws))
    names = [name for name, of_profile in of_profiles.items() for _ in of_profile]
    number = Column("source", lambda law: f"[{sources.index(law.source) + 1}]")
    table = data.variation_table(laws, number)
    rows = [(name, *cells) for name, cells in zip(names, table.cells(), strict=True)]
    table = Table(("profile", *table.header()), rows)
    notes = [f"[{i}] {source}" for i, source in enumerate(sources, 1)]
    return Output(msgspec.to_builtins({"variability": of_profiles}), table, notes)


@command(
    "--progress",
    how={"--with": {"dest": "library"}},
    csv=True,
    writes=Writes("--out", names=lambda: prism.measure.FILES),
)
def measure(args: Args) -> Output:
    """Measure the kernels of this machine, and write it as a cluster for jobs.

    --job JOB  a job, whose layers on one device have the measured shapes (a grid of widths, in
        bf16)
    --quick  measure for a minute, not for ten
    --seconds S  for how long to compile and measure (600); what is not compiled in half of it is
        left out
    --with {jax,torch} (jax)  through jax; or through torch, for jobs of plain PyTorch: each class
        of its kernels, how long a launch takes, and the memory of an empty process
    --out FOLDER (required)  the folder to write

    example: prism-jax measure --quick --out my_machine
    """
    # XLA would time many versions of each product first.
    os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {os.environ.get('XLA_FLAGS', '')}"
    import jax

    begin, machine = time.perf_counter(), prism.measure
    path = os.path.join(args.out, "cluster.toml")
    seconds = (_QUICK if args.quick else _SECONDS) if args.seconds is None else args.seconds
    job = data.load_job(args.job) if args.job else None
    torch = machine.Torch() if args.library == "torch" else None
    if torch is None:
        calls, empty = machine.calls_for(job, jax.local_devices(), seconds), None
    else:
        calls, empty = [torch.calls(job)], torch.empty()
    _load.say(args, f"measuring {len(calls[0])} calls on each device")
    seconds_left = max(seconds - (time.perf_counter() - begin), 0.0)
    timed = machine.time_calls(
        calls, seconds_left, progress=_load.wants_progress(args), empty=empty
    )
    if timed.interrupted:
        _load.tell_ended(f"{plural(timed.seconds.shape[2], 'round')}; the machine is of these")
    scatter = machine.split_scatter(timed.seconds, timed.kinds)
    words = f"{f'--job {quoted(args.job)} ' if args.job else ''}--seconds {seconds:g}"
    words += f" --with {args.library}" * (torch is not None)
    machine.save_machine(args.out, timed, scatter, f"prism-jax measure {words}", torch)
    devices, _, rounds = timed.seconds.shape
    result = {
        "machine": args.out,
        "devices": devices,
        "rounds": rounds,
        "dispatch_s": timed.dispatch_s,
        "left_out": timed.left_out,
        "kernels": plain(machine.rates_of(timed)),
        **plain(scatter),
    }
    blocks: list[Any] = [_rates(result)]
    if torch is not None:
        result |= {"launch_s": torch.launch_s(), "context_bytes": torch.context_bytes}
        blocks.append(
            f"a launch takes {1e6 * result['launch_s']:.3g} us, and what a framework does around "
            "it more: `training.host_forward_s`, `training.host_backward_s`; an empty process has "
            f"{torch.context_bytes / GIB:.2f} GiB"
        )
    use = f"{shown(path)}: written; for a job: `--set cluster={shown(path)} --set num_nodes=1`"
    return Output(result, *blocks, use)


def _rates(result: dict[str, Any]) -> Table:
    residual, rank = result["residual"], result["rank"]
    columns = (
        "kernel",
        "dtype",
        Column("size", "size", ".4g"),
        Column("mean", "seconds", ".4g", "ms", scale=1e3),
        Column("per second", lambda row: row["size"] / row["seconds"], ".4g"),
        Column(
            "residual", lambda row: residual[prism.measure.variability_kind(row["kernel"])], ".3f"
        ),
    )
    rounds, devices = plural(result["rounds"], "round"), plural(result["devices"], "device")
    notes = [
        "residual: the standard deviation of the logarithm of one call; that of what a round has "
        f"in common is {result['step']:.3f}, with an autocorrelation of "
        f"{result['autocorrelation']:.2f}" + ("" if rank is None else f", of devices {rank:.3f}"),
        f"dispatch: {1e6 * result['dispatch_s']:.3g} us, subtracted; shorter calls that are left "
        f"out: {result['left_out']}",
    ]
    title = f"{rounds} on {devices}; sizes in FLOPs, or in bytes without a dtype:"
    return Table(columns, result["kernels"], title, notes)


@command(
    "--progress",
    csv=True,
    writes=Writes("--out", names=lambda: _FILES),
)
def fit_kernels(args: Args) -> Output:
    """Fit latencies by shape to measured kernels, and test them on shapes that are left out. They
    do not change predicted steps.

    table [TABLE]  a .csv or .parquet file with a row for each measured shape: kernel, dtype,
        latency_s, and m n k (gemm), batch sequence heads kv_heads head_dim window causal
        (attention), tokens hidden intermediate topk experts ep tp gated exponent (experts), or
        bytes gpus (all_reduce and other collectives within a node); and perhaps the phase of a call
        of training, backward or step
    --device DEVICE  the name of the device that was measured
    --sms N  its multiprocessors, for the waves of a product's tiles
    --software TEXT (not stated)  with which software it was measured
    --ask SHAPE  predict a shape, such as 'gemm bf16 m=4096 n=4096 k=4096', and say whether it lies
        in the fitted range
    --out FOLDER  the folder to write
    --nccl OUTPUT  print the link that an output of nccl-tests measured, for a cluster, and its
        efficiencies by size; in place of a table
    --topo OUTPUT  print the links of a node, for a cluster, by what `nvidia-smi topo -m` printed on
        it and --device; in place of a table

    example: prism-jax fit-kernels kernels.csv --device my-gpu --out shapes/my-gpu
    """
    if args.nccl is not None:
        return _link(args.nccl)
    if args.topo is not None:
        return _links(args.topo, args.device)
    for name in ("table", "device", "out"):
        if getattr(args, name) is None:
            words = name.upper() if name == "table" else f"--{name}"
            raise ValueError(f"Give {words}; only `--nccl` and `--topo` go without.")
    tables, rows = [], []
    for kernel in prism.trace.read_kernels(args.table):
        _load.say(args, f"fitting {kernel.kernel} {kernel.dtype}")
        tables.append(prism.cluster.fit_shapes(kernel, args.sms or 0))
        errors = prism.cluster.cross_validate(kernel, args.sms or 0)
        rows.append(_row(kernel, tables[-1], errors))
    prediction = _prediction_of(args.ask, tables) if args.ask is not None else None
    os.makedirs(args.out, exist_ok=True)
    data.save_shapes(args.out, tables, _source(args, rows))
    result = {"kernels": args.out, "device": args.device, "tables": rows, "asked": prediction}
    written = f"{shown(args.out)}: written, for {quoted(args.device)}"
    return Output(result, _errors(rows), written, prediction and prediction["text"])


def _link(path: str) -> Output:
    """The link that nccl-tests measured."""
    text = data.read_text(path, _MOST_TEXT)
    with data.located(shown(path)):
        try:
            test = prism.measure.nccl_test_of(text, os.path.basename(path))
        except ValueError as error:
            raise ValueError(f"{error}; give another file.") from None
    rows = [
        {"bytes": size, "seconds": seconds, "efficiency": share}
        for size, seconds, share in zip(
            test.bytes.tolist(), test.seconds.tolist(), test.efficiency.tolist(), strict=True
        )
    ]
    link = {"bandwidth_bytes_per_s": test.bandwidth_bytes_per_s, "latency_s": test.latency_s}
    columns = (
        Column("bytes", "bytes", ",.0f"),
        Column("time", "seconds", ".4g", "us", scale=1e6),
        Column("efficiency", "efficiency", ".3f"),
    )
    title = f"{test.kernel} of {plural(test.gpus, 'GPU')}"
    lines = [
        "as a link of a cluster file, and rows of its `efficiency.csv`:",
        "[[links]]",
        *(f"{name} = {value:.4g}" for name, value in link.items()),
        "kernel,link,bytes,efficiency",
        *(f"{test.kernel},NAME,{row['bytes']:.0f},{row['efficiency']:.3f}" for row in rows),
    ]
    result = {"kernel": test.kernel, "gpus": test.gpus, "link": link, "rows": rows}
    return Output(result, Table(columns, rows, title), lines)


def _links(path: str, device: str | None) -> Output:
    """The links of a node, from its topology."""
    if device is None:
        raise ValueError("Give --device, whose generation says how fast a link is.")
    text = data.read_text(path, _MOST_TEXT)
    with data.located(shown(path)):
        try:
            links = prism.measure.links_of_topology(text, data.load_device(device).name)
        except ValueError as error:
            raise ValueError(f"{error}; give another file.") from None
    lines = [f"devices_per_node = {links[-1].group}"]
    for link in links:
        lines += ["[[links]]", f'name = "{link.name}"', f"group = {link.group}"]
        lines += [f"bandwidth_bytes_per_s = {link.bandwidth_bytes_per_s:.4g}"]
        lines += [f"latency_s = {link.latency_s:.4g}"]
    first = "of a cluster file, beside the link between nodes; nominal, so nccl-tests know better:"
    return Output({"device": device, "links": links}, [first, *lines])


def _row(measured: Any, table: Any, errors: np.ndarray) -> dict[str, Any]:
    known = not np.isnan(errors).any()
    return {
        "kernel": measured.kernel,
        "dtype": measured.dtype,
        "case": measured.case,
        "rows": len(errors),
        "error": float(np.std(errors)) if known else None,
        "bias": float(np.mean(errors)) if known else None,
        "range": {name: list(ends) for name, ends in table.ranges.items()},
    }


def _source(args: Args, rows: list[dict[str, Any]]) -> Any:
    counts: Counter[str] = Counter()
    for row in rows:
        counts[f"rows of {row['kernel']} {row['dtype']}".rstrip()] += row["rows"]
    command = f"prism-jax fit-kernels {quoted(os.path.basename(args.table))}"
    made = data.Constant("command", command, f"fitted to measurements of {quoted(args.device)}")
    today = datetime.date.today().isoformat()
    who = "the owner of the measurements"
    return data.Source(who, today, args.software or "not stated", "not stated", {**counts}, (made,))


def _errors(rows: list[dict[str, Any]]) -> Table:
    columns = (
        "kernel",
        "dtype",
        Column("case", lambda row: f"{row['case']:g}" if row["case"] else ""),
        "rows",
        Column("error", "error", ".3f"),
        Column("bias", "bias", "+.3f"),
        Column("range", lambda row: _range_text(row["range"])),
    )
    title = (
        "errors of shapes that were left out of the fit: the standard deviation and the mean of "
        "log(predicted / measured); `case` is the size of heads, or the exponent of loads:"
    )
    return Table(columns, rows, title)


def _range_text(ranges: dict[str, list[float]]) -> str:
    return ", ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in ranges.items())


def _prediction_of(text: str, tables: list[Any]) -> dict[str, Any]:
    """What a table predicts for a shape, and which of its sizes lie beyond the fitted range."""
    pl = needed("polars")
    kernel, *words = text.split() or [""]
    dtype = words.pop(0) if words and "=" not in words[0] else ""
    sizes = {name: _size(value) for name, _, value in (word.partition("=") for word in words)}
    with data.located("--ask"):
        prism.trace.check_columns(sizes)
    row = {"latency_s": 1.0, **sizes, "kernel": kernel, "dtype": dtype}
    (measured,) = prism.trace.measured_kernels(pl.DataFrame([row]), "--ask")
    key = (measured.kernel, measured.dtype, measured.case)
    table = next((t for t in tables if (t.kernel, t.dtype, t.case) == key), None)
    if table is None:
        names = ", ".join(dict.fromkeys(map(_name, tables)))
        raise ValueError(
            f"--ask: no table is fitted for `{quoted(_name(measured))}`; ask for one of "
            f"{quoted(names, 300)}."
        )
    shape = {name: float(values[0]) for name, values in measured.columns.items()}
    latency, beyond = prism.cluster.shape_latency(table, shape), data.outside(table, shape)
    sentence = f"{quoted(text)}: {latency:.4g} s"
    for name in beyond:
        low, high = table.ranges[name]
        sentence += (
            f"; `{name}` is {shape[name]:g}, beyond the fitted range from {low:g} to {high:g}"
        )
    sentence += ", whose end is used in its place" if beyond else ", within the fitted range"
    return {"text": sentence, "latency_s": latency, "outside": list(beyond)}


def _name(table: Any) -> str:
    case = f"{table.case:g}" if table.case else ""
    return " ".join(filter(None, (table.kernel, table.dtype, case)))


def _size(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"--ask: `{quoted(text)}` is not a number; write sizes such as `m=4096`."
        ) from None

"""Lists of what the package has: jobs, models, hardware and profiles of kernels."""

from collections.abc import Iterable
from typing import Any

import msgspec

from .. import data
from .._misc import unknown_name
from .._summary import Column, Table, picked, plain
from . import _prism as prism
from ._options import Given, Output, arguments, command


_SOURCES = arguments("--sources  also print where the numbers are from (--json always has it)")


@command(_SOURCES, csv=True)
def jobs(given: Given) -> Output:
    """List the shipped jobs.

    example: prism-jax jobs --sources
    """
    jobs = [*map(data.load_job, data.list_jobs())]
    rows = [_row(job) for job in jobs]
    columns = (
        Column("job", "name"),
        Column("GPUs", "world_size", "d"),
        "model",
        "cluster",
        Column("layout", _layout),
        "schedule",
        Column("measured", _measured, unit="s"),
    )
    return Output({"jobs": rows}, [Table(columns, rows, most=None), _sources(given, jobs)])


def _row(job: data.Job) -> dict[str, Any]:
    measured = {} if job.measured is None else plain(job.measured)
    return {
        "name": job.name,
        "world_size": job.layout.world_size,
        "model": job.model.name if job.model else "",
        "cluster": job.cluster.name if job.cluster else "",
        "layout": plain(job.layout),
        "schedule": job.schedule.kind,
        "num_microbatches": job.schedule.num_microbatches,
        "measured": {name: value for name, value in measured.items() if value is not None},
        "source": job.source,
    }


def _layout(row: dict[str, Any]) -> str:
    return " ".join(f"{name}{row['layout'][name]}" for name in ("tp", "pp", "dp", "cp", "ep"))


def _measured(row: dict[str, Any]) -> Any:
    return row["measured"].get("mean_s", row["measured"].get("p50_s", ""))


def _sources(given: Given, listed: Iterable[Any]) -> str:
    return "\n".join(f"{one.name}: {one.source}" for one in listed if given.sources)


@command(_SOURCES, csv=True)
def models(given: Given) -> Output:
    """List the shipped models.

    example: prism-jax models --sources
    """
    models = [*map(data.load_model, data.list_models())]
    sizes = ("num_layers", "hidden_size", "vocab_size", "source")
    rows = [
        {
            "name": one.name,
            "parameters": prism.workload.count_parameters(one),
            **picked(one, *sizes),
        }
        for one in models
    ]
    columns = (
        Column("model", "name"),
        Column("billion parameters", "parameters", ".1f", scale=1e-9),
        Column("layers", "num_layers", "d"),
        Column("width", "hidden_size", "d"),
    )
    return Output({"models": rows}, [Table(columns, rows, most=None), _sources(given, models)])


@command(_SOURCES, how={"names": {"default": [], "nargs": "*"}}, csv=True)
def hardware(given: Given) -> Output:
    """List the shipped devices and clusters, or some of them.

    names NAME  devices or clusters (all)

    example: prism-jax hardware dgx-h100
    """
    known = {*data.list_devices(), *data.list_clusters()}
    for name in given.names:
        if name not in known:
            raise ValueError(unknown_name("device or cluster", name, known))
    wanted = {*given.names} or known
    # The job sets the number of nodes of a family; a cluster of two racks has all links.
    clusters = [data.load_cluster(name, 10**6) for name in data.list_clusters() if name in wanted]
    wanted |= {cluster.device.name for cluster in clusters}
    devices = [one for one in map(data.load_device, data.list_devices()) if one.name in wanted]
    peaks = sorted({dtype for device in devices for dtype in device.peak_flop_per_s})
    columns = (
        Column("device", "name"),
        Column("GB", "memory_bytes", ".0f", scale=1e-9),
        Column("TB/s", "memory_bandwidth_bytes_per_s", ".2f", scale=1e-12),
        *(
            Column(f"{dtype} TFLOP/s", f"peak_flop_per_s.{dtype}", ".0f", scale=1e-12)
            for dtype in peaks
        ),
    )
    columns_of_clusters = (
        Column("cluster", "name"),
        Column("devices a node", "devices_per_node"),
        Column("device", "device.name"),
        Column("links", _links),
    )
    result = {
        "devices": msgspec.to_builtins(devices),
        "clusters": [_family(cluster) for cluster in clusters],
    }
    tables = [Table(columns, result["devices"], most=None)]
    tables += [Table(columns_of_clusters, clusters, most=None)] * bool(clusters)
    return Output(result, [*tables, _sources(given, (*devices, *clusters))])


def _links(cluster: data.Cluster) -> str:
    return ", ".join(
        f"{link.name} {link.bandwidth_bytes_per_s / 1e9:.0f} GB/s" for link in cluster.links
    )


def _family(cluster: data.Cluster) -> dict[str, Any]:
    """A cluster without its number of nodes."""
    found = msgspec.to_builtins(cluster)
    del found["num_nodes"]
    for link in found["links"][-1:]:
        link["group"] = None
    return found


@command()
def kernels(given: Given) -> Output:
    """List the shipped kernel profiles, with their sources.

    --variability  how much kernels vary, with sources

    example: prism-jax kernels --variability
    """
    if given.variability:
        return _variability()
    sources = [data.load_source(name) for name in data.list_kernels()]
    stacks = [data.load_software(name) for name in data.list_software()]
    blocks = []
    for source in sources:
        lines = [f"{source.name}: {source.who}, {source.when}; {source.licence}"]
        lines += [f"  chosen: {c.name} = {c.value}: {c.reason}" for c in source.constants]
        blocks.append("\n".join(lines))
    for stack in stacks:
        switches = (f"  {key} = {value}" for key, value in stack.training.items())
        blocks.append("\n".join([f"software {stack.name}: {stack.source}", *switches]))
    return Output(msgspec.to_builtins({"kernels": sources, "software": stacks}), blocks)


def _variability() -> Output:
    """The laws of all profiles as a table, and below it their numbered sources."""
    found = {name: data.load_variability(name) for name in data.list_kernels()}
    laws = [law for of_profile in found.values() for law in of_profile]
    sources = list(dict.fromkeys(law.source for law in laws))
    names = [name for name, of_profile in found.items() for _ in of_profile]
    number = Column("source", lambda law: f"[{sources.index(law.source) + 1}]")
    table = data.law_table(laws, number)
    rows = [(name, *cells) for name, cells in zip(names, table.cells(), strict=True)]
    table = Table(("profile", *table.header()), rows, most=None)
    notes = "\n".join(f"[{i}] {source}" for i, source in enumerate(sources, 1))
    return Output(msgspec.to_builtins({"variability": found}), [table, notes])

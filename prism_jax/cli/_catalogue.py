"""`prism-jax jobs`, `hardware` and `kernels`: what is shipped, with sources."""

import argparse
from collections.abc import Sequence
from typing import Any

import msgspec

from .. import data


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of text, the numbers to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    right = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    )


class Jobs:
    HELP = "list the shipped jobs"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """There are none."""

    @staticmethod
    def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
        del arguments
        jobs = [data.load_job(name) for name in data.list_jobs()]
        rows, listed = [], []
        for job in jobs:
            layout, schedule, measured = job.layout, job.schedule, job.measured
            cluster = job.cluster.name if job.cluster else ""
            model = job.model.name if job.model else ""
            known = {
                k: v
                for k, v in (msgspec.structs.asdict(measured) if measured else {}).items()
                if v is not None
            }
            mean = known.get("mean_s", known.get("p50_s", ""))
            degrees = f"tp{layout.tp} pp{layout.pp} dp{layout.dp} cp{layout.cp}"
            rows.append((job.name, layout.world_size, model, cluster, degrees, schedule.kind, mean))
            listed.append(
                {
                    "name": job.name,
                    "world_size": layout.world_size,
                    "model": model,
                    "cluster": cluster,
                    "layout": msgspec.structs.asdict(layout),
                    "schedule": schedule.kind,
                    "num_microbatches": schedule.num_microbatches,
                    "measured": known,
                    "source": job.source,
                }
            )
        header = ("job", "GPUs", "model", "cluster", "layout", "schedule", "measured s")
        sources = [f"{job.name}: {job.source}" for job in jobs if job.source]
        return {"jobs": listed}, table(header, rows) + "\n\n" + "\n".join(sources)

    @staticmethod
    def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
        """A row for each job."""
        return result["jobs"]


class Hardware:
    HELP = "list the shipped devices and clusters"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """There are none."""

    @staticmethod
    def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
        del arguments
        devices = [data.load_device(name) for name in data.list_devices()]
        # The job sets the number of nodes of a family; a cluster of two racks has all links.
        clusters = [data.load_cluster(name, 10**6) for name in data.list_clusters()]
        peaks = sorted({dtype for device in devices for dtype in device.peak_flop_per_s})
        rows = [
            (
                device.name,
                f"{device.memory_bytes / 1e9:.0f}",
                f"{device.memory_bandwidth_bytes_per_s / 1e12:.2f}",
                *(f"{device.peak_flop_per_s.get(d, 0) / 1e12:.0f}" for d in peaks),
            )
            for device in devices
        ]
        header = ("device", "GB", "TB/s", *(f"{dtype} TFLOP/s" for dtype in peaks))
        links = [
            (
                cluster.name,
                cluster.devices_per_node,
                cluster.device.name,
                ", ".join(
                    f"{link.name} {link.bandwidth_bytes_per_s / 1e9:.0f} GB/s"
                    for link in cluster.links
                ),
            )
            for cluster in clusters
        ]
        text = [table(header, rows), table(("cluster", "devices a node", "device", "links"), links)]
        sources = [f"{x.name}: {x.source}" for x in (*devices, *clusters) if x.source]
        result = {
            "devices": [msgspec.to_builtins(device) for device in devices],
            "clusters": [_family(cluster) for cluster in clusters],
        }
        return result, "\n\n".join([*text, "\n".join(sources)])

    @staticmethod
    def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
        """A row for each device."""
        return result["devices"]


def _family(cluster: data.Cluster) -> dict[str, Any]:
    """A cluster without its number of nodes."""
    table = msgspec.to_builtins(cluster)
    del table["num_nodes"]
    links = [link | {"group": None} for link in table["links"][-1:]]
    return table | {"links": [*table["links"][:-1], *links]}


class KernelProfiles:
    HELP = "list the shipped kernel profiles, with their sources"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--variability", action="store_true", help="how much kernels vary, with sources"
        )

    @staticmethod
    def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
        names = data.list_kernels()
        sources = [data.load_source(name) for name in names]
        if arguments.variability:
            return _variability(names)
        sections = []
        for source in sources:
            lines = [f"{source.name}: {source.who}, {source.when}; {source.licence}"]
            lines += [f"  chosen: {c.name} = {c.value}: {c.reason}" for c in source.constants]
            sections.append("\n".join(lines))
        stacks = [data.load_software(name) for name in data.list_software()]
        for stack in stacks:
            switches = (f"  {key} = {value}" for key, value in stack.training.items())
            sections.append("\n".join([f"software {stack.name}: {stack.source}", *switches]))
        result = {"kernels": [msgspec.to_builtins(s) for s in sources]}
        return result | {"software": [msgspec.to_builtins(s) for s in stacks]}, "\n\n".join(
            sections
        )


def _variability(names: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The laws of all profiles as a table, and below it their numbered sources."""
    found = {name: data.load_variability(name) for name in names}
    sources = list(dict.fromkeys(v.source for laws in found.values() for v in laws))
    rows = [
        (
            name,
            v.kernel or "all",
            v.component,
            v.family,
            ", ".join(f"{key} {value:g}" for key, value in v.parameters.items()),
            f"[{sources.index(v.source) + 1}]",
        )
        for name, laws in found.items()
        for v in laws
    ]
    header = ("profile", "kernel", "component", "family", "parameters", "source")
    notes = "\n".join(f"[{i}] {source}" for i, source in enumerate(sources, 1))
    result = {name: [msgspec.to_builtins(v) for v in laws] for name, laws in found.items()}
    return {"variability": result}, f"{table(header, rows)}\n\n{notes}"

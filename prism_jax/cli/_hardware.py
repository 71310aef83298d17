from typing import Any

import msgspec

from .. import data
from .._misc import unknown_name
from .._summary import Column, Table
from ._options import SOURCES, Given, Output, argument, command


@command(
    "dgx-h100",
    argument("names NAME", "devices or clusters (all)", nargs="*", default=[]),
    SOURCES,
    csv=True,
)
def run(given: Given) -> Output:
    """List the shipped devices and clusters, or some of them."""
    known = {*data.list_devices(), *data.list_clusters()}
    for name in given.names:
        if name not in known:
            raise ValueError(unknown_name("device or cluster", name, known))
    wanted = {*given.names} or known
    # The job sets the number of nodes of a family; a cluster of two racks has all links.
    clusters = [data.load_cluster(name, 10**6) for name in data.list_clusters() if name in wanted]
    of_clusters = {cluster.device.name for cluster in clusters}
    devices = [data.load_device(name) for name in data.list_devices()]
    devices = [one for one in devices if one.name in wanted | of_clusters]
    peaks = sorted({dtype for device in devices for dtype in device.peak_flop_per_s})
    columns = (
        Column("device", "name"),
        Column("GB", "memory_bytes", ".0f", scale=1e-9),
        Column("TB/s", "memory_bandwidth_bytes_per_s", ".2f", scale=1e-12),
        *(
            Column(
                f"{dtype} TFLOP/s",
                lambda device, dtype=dtype: device["peak_flop_per_s"].get(dtype),
                ".0f",
                scale=1e-12,
            )
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
        "devices": [msgspec.to_builtins(device) for device in devices],
        "clusters": [_family(cluster) for cluster in clusters],
    }
    tables = [Table(columns, result["devices"], most=None)]
    tables += [Table(columns_of_clusters, clusters, most=None)] * bool(clusters)
    sources = [f"{x.name}: {x.source}" for x in (*devices, *clusters) if given.sources]
    return Output(result, [*tables, "\n".join(sources)])


def _links(cluster: data.Cluster) -> str:
    return ", ".join(
        f"{link.name} {link.bandwidth_bytes_per_s / 1e9:.0f} GB/s" for link in cluster.links
    )


def _family(cluster: data.Cluster) -> dict[str, Any]:
    """A cluster without its number of nodes."""
    found = msgspec.to_builtins(cluster)
    del found["num_nodes"]
    links = [link | {"group": None} for link in found["links"][-1:]]
    return found | {"links": [*found["links"][:-1], *links]}

"""Machines of published rows, and the software on them."""

import functools as ft
import re

import msgspec

from prism_jax import data
from prism_jax.workload import count_parameters

from ._rows import WORDS


def device_of(name: str) -> str:
    """The device in `hardware/devices` of a machine; empty if it is not known."""
    letters = re.sub("[^a-z0-9]", "", name.lower())
    return next((found for part, found in WORDS["devices"].items() if re.search(part, letters)), "")


def cluster_of(name: str) -> str:
    """The machine in `hardware/clusters` with a device that a name says.

    **Raises:**

    A `ValueError` if its device is not known.
    """
    if not (device := device_of(name)):
        raise ValueError(f"no device {name}")
    return WORDS["clusters"][device]


switches_of = ft.cache(lambda stack: data.load_software(stack).training)
_shipped = ft.cache(data.load_cluster)  # Read once for all rows of a size.
_kernels = ft.cache(lambda cluster, nodes: data.load_kernels(_shipped(cluster, nodes)))


def job_on(model, layout, schedule, training, cluster: str, note: str = "") -> data.Job:
    nodes = -(-layout.world_size // _shipped(cluster, 1).devices_per_node)
    machine, kernels = _shipped(cluster, nodes), _kernels(cluster, nodes)
    adapters = re.search(r"(\d+) x (\d+) Gb RoCE a node", note)
    if adapters and len(machine.links) > 1:
        bandwidth = int(adapters[1]) * int(adapters[2]) / 8 * 1e9 / machine.devices_per_node
        *inner, last = machine.links
        last = msgspec.structs.replace(last, bandwidth_bytes_per_s=bandwidth)
        machine = msgspec.structs.replace(machine, links=(*inner, last))
    if training.zero < 2 and layout.ep == 1:
        _check_memory(model, layout, machine)
    parts = {"model": model, "cluster": machine, "training": training, "kernels": kernels}
    return data.Job(layout, schedule, name="published", **parts)


def _check_memory(model: data.Model, layout: data.Layout, machine: data.Cluster) -> None:
    """Refuses what only sharded parameters can have run: two bytes of each parameter and of its
    gradient alone are more than a device holds."""
    held = 4 * count_parameters(model) / (layout.tp * layout.pp)
    if held > machine.device.memory_bytes:
        raise ValueError("parameters must have been sharded, for they do not fit")

"""Machines: devices, and clusters of them."""

import msgspec

from ._types import Count, Label, Name, NonNegative, Positive


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One accelerator.

    **Attributes:**

    - `memory_bytes`, `memory_bandwidth_bytes_per_s`: of its main memory.
    - `peak_flop_per_s`: for each dtype, without sparsity.
    - `name`: what it is called.
    - `kernels`: the folder of `kernels/` with its efficiencies and variability; by default the one
        that is called as it is.
    - `source`: where the numbers are from.
    """

    memory_bytes: Positive
    memory_bandwidth_bytes_per_s: Positive
    peak_flop_per_s: dict[Name, Positive]
    name: Label = ""
    kernels: Name | None = None
    source: str = ""


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A network level that joins groups of consecutive ranks.

    **Attributes:**

    - `name`: what it is called.
    - `group`: how many ranks it joins.
    - `bandwidth_bytes_per_s`: per device and direction.
    - `latency_s`: of one hop.
    """

    name: Name
    group: Count
    bandwidth_bytes_per_s: Positive
    latency_s: NonNegative = 1e-5


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes of equal devices, and the links between them, innermost first.

    **Attributes:**

    - `device`: the accelerator.
    - `num_nodes`, `devices_per_node`: how many there are.
    - `links`: innermost first; the last one joins all devices.
    - `name`: what it is called; that of its family.
    - `kernels`: the folder of `kernels/` with the efficiencies and variability of its collectives.
    - `source`: where the numbers are from.
    """

    device: Device
    num_nodes: Count
    devices_per_node: Count
    links: tuple[Link, ...]
    name: Label = ""
    kernels: Name | None = None
    source: str = ""

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

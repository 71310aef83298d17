"""Machines: devices, and clusters of them."""

import msgspec

from ._types import Count, Label, Name, NonNegative, Positive


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One accelerator.

    **Attributes:**

    - `memory_bytes`: the size of its main memory.
    - `memory_bandwidth_bytes_per_s`: the bandwidth of its main memory.
    - `peak_flop_per_s`: the peak rate for each dtype, without sparsity.
    - `name`: the name of the device.
    - `kernels`: the folder of `kernels/` with its efficiencies and variability; by default the
        folder with the name of the device.
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

    - `name`: the name of the link.
    - `group`: how many consecutive ranks it joins.
    - `bandwidth_bytes_per_s`: the bandwidth per device and direction.
    - `latency_s`: the latency of one hop.
    """

    name: Name
    group: Count
    bandwidth_bytes_per_s: Positive
    latency_s: NonNegative = 1e-5


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes of equal devices, and the links between them.

    **Attributes:**

    - `device`: the accelerator.
    - `num_nodes`: the number of nodes.
    - `devices_per_node`: the number of devices in each node.
    - `links`: the links, innermost first; the last one joins all devices.
    - `name`: the name of its family.
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

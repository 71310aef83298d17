from ._calls import (
    KernelCall as KernelCall,
    calls_of as calls_of,
    compute_kernels as compute_kernels,
)
from ._machine import FILES as FILES, rates_of as rates_of, save_machine as save_machine
from ._nccl import NcclTest as NcclTest, nccl_test_of as nccl_test_of
from ._time import (
    Scatter as Scatter,
    Timed as Timed,
    calls_for as calls_for,
    split_scatter as split_scatter,
    time_calls as time_calls,
    variability_kind as variability_kind,
)
from ._topology import links_of_topology as links_of_topology
from ._torch import Torch as Torch

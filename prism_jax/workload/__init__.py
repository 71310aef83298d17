from ._architecture import (
    count_parameters as count_parameters,
    has_experts as has_experts,
    has_tables as has_tables,
    widen as widen,
)
from ._block import (
    Block as Block,
    Branches as Branches,
    Kernel as Kernel,
    Load as Load,
    Reduction as Reduction,
    Row as Row,
    Segment as Segment,
    Workload as Workload,
)
from ._costs import Costs as Costs
from ._lower import lower as lower
from ._memory import (
    Sizes as Sizes,
    StageMemory as StageMemory,
    add_sizes as add_sizes,
    held_by_stages as held_by_stages,
    memory_of_stages as memory_of_stages,
    total as total,
)
from ._model_flop import model_flop as model_flop
from ._parts import (
    block_mean as block_mean,
    block_means as block_means,
    rows_of as rows_of,
    split_mean as split_mean,
)
from ._passes import pair as pair
from ._split import (
    check_split as check_split,
    layers_of_stages as layers_of_stages,
)

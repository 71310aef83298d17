from ._base import AbstractSchedule as AbstractSchedule
from ._custom import (
    CustomSchedule as CustomSchedule,
    ForwardOnly as ForwardOnly,
    Repeated as Repeated,
    load_schedule as load_schedule,
    save_schedule as save_schedule,
)
from ._evaluate import (
    Timeline as Timeline,
    evaluate as evaluate,
    group_ends as group_ends,
    replay as replay,
)
from ._graph import OpGraph as OpGraph, op_graph as op_graph
from ._in_turns import (
    ZBH1 as ZBH1,
    ZBH2 as ZBH2,
    GPipe as GPipe,
    InterleavedOneFOneB as InterleavedOneFOneB,
    InterleavedZeroBubble as InterleavedZeroBubble,
    LoopedBFS as LoopedBFS,
    OneFOneB as OneFOneB,
    OverlappedOneFOneB as OverlappedOneFOneB,
)
from ._ops import (
    OVERLAPPED as OVERLAPPED,
    PHASES as PHASES,
    SEND_RECV as SEND_RECV,
    parse_token as parse_token,
    peak_in_flight as peak_in_flight,
    phases_of as phases_of,
    schedule_parts as schedule_parts,
)
from ._registry import (
    TRACED as TRACED,
    make_schedule as make_schedule,
    order_of as order_of,
    schedule_class as schedule_class,
    schedule_name as schedule_name,
    schedules as schedules,
)
from ._two_way import Chimera as Chimera, DualPipe as DualPipe, DualPipeV as DualPipeV
from ._v_shape import (
    ZBV as ZBV,
    Hanayo as Hanayo,
    VHalf as VHalf,
    VMin as VMin,
)
from ._zb_greedy import ZBGreedy as ZBGreedy

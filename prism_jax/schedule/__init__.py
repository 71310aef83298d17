from ._base import AbstractSchedule as AbstractSchedule
from ._chimera import Chimera as Chimera
from ._contract import latest_ends as latest_ends
from ._csv import load_schedule as load_schedule, save_schedule as save_schedule
from ._custom import CustomSchedule as CustomSchedule
from ._derived import ForwardOnly as ForwardOnly, Repeated as Repeated
from ._dual_pipe import DualPipe as DualPipe, DualPipeV as DualPipeV
from ._evaluate import Timeline as Timeline, evaluate as evaluate
from ._gpipe import GPipe as GPipe
from ._graph import OpGraph as OpGraph, op_graph as op_graph
from ._hanayo import Hanayo as Hanayo
from ._in_flight import peak_in_flight as peak_in_flight
from ._interleaved import (
    InterleavedOneFOneB as InterleavedOneFOneB,
    InterleavedZeroBubble as InterleavedZeroBubble,
    OverlappedOneFOneB as OverlappedOneFOneB,
)
from ._looped_bfs import LoopedBFS as LoopedBFS
from ._one_f_one_b import OneFOneB as OneFOneB
from ._ops import phases_of as phases_of
from ._order_of import TRACED as TRACED, order_of as order_of
from ._parts import schedule_parts as schedule_parts
from ._registry import (
    make_schedule as make_schedule,
    schedule_name as schedule_name,
    schedules as schedules,
)
from ._replay import replay as replay
from ._token import (
    OVERLAPPED as OVERLAPPED,
    PHASES as PHASES,
    SEND_RECV as SEND_RECV,
    parse_token as parse_token,
)
from ._v_block import VHalf as VHalf, VMin as VMin
from ._zb_greedy import ZBGreedy as ZBGreedy
from ._zb_h1 import ZBH1 as ZBH1
from ._zb_h2 import ZBH2 as ZBH2
from ._zbv import ZBV as ZBV

from ._base import AbstractSchedule as AbstractSchedule
from ._custom import CustomSchedule as CustomSchedule
from ._evaluate import Timeline as Timeline, evaluate as evaluate
from ._gpipe import GPipe as GPipe
from ._graph import OpGraph as OpGraph, op_graph as op_graph
from ._interleaved import InterleavedOneFOneB as InterleavedOneFOneB
from ._looped_bfs import LoopedBFS as LoopedBFS
from ._one_f_one_b import OneFOneB as OneFOneB
from ._registry import make_schedule as make_schedule, schedules as schedules
from ._replay import replay as replay
from ._token import (
    OVERLAPPED as OVERLAPPED,
    SEND_RECV as SEND_RECV,
    parse_token as parse_token,
)

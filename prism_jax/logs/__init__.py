from ._ranks import RankFactors as RankFactors, read_ranks as read_ranks
from ._read import Measured as Measured, read_log as read_log
from ._steps import LeftOut as LeftOut

from ._read import Measured as Measured, read_log as read_log
from ._steps import LeftOut as LeftOut

from ._accumulator import Accumulator as Accumulator, Errors as Errors, grid_of as grid_of
from ._file import load_law as load_law, save_law as save_law
from ._law import (
    FEWEST as FEWEST,
    LEVELS as LEVELS,
    NUM_BINS as NUM_BINS,
    NUM_EXTREMES as NUM_EXTREMES,
    QUANTILES as QUANTILES,
    Law as Law,
    figures as figures,
)
from ._merge import (
    merge_allocations as merge_allocations,
    merge_laws as merge_laws,
    merge_randomisations as merge_randomisations,
    merge_stretches as merge_stretches,
)

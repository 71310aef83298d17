from ._advice import check_memory as check_memory
from ._enumerate import enumerate_layouts as enumerate_layouts
from ._rank import (
    NothingFitsError as NothingFitsError,
    check_ranks as check_ranks,
    rank_layouts as rank_layouts,
)
from ._ranking import RankedLayout as RankedLayout, Ranking as Ranking
from ._space import LayoutSpace as LayoutSpace, layout_name as layout_name

from ._chrome_trace import chrome_trace as chrome_trace, save_chrome_trace as save_chrome_trace
from ._gantt import gantt as gantt
from ._heat_map import heat_map as heat_map
from ._laws import cdf as cdf, histogram as histogram, qq as qq, training_run as training_run
from ._memory import memory as memory
from ._rows import breakdown as breakdown, layouts as layouts, tornado as tornado
from ._scale import scale as scale

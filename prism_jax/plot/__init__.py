from ._chrome_trace import chrome_trace as chrome_trace, save_chrome_trace as save_chrome_trace
from ._laws import cdf as cdf, histogram as histogram, qq as qq, training_run as training_run
from ._pipeline import gantt as gantt, heat_map as heat_map, memory as memory
from ._rows import breakdown as breakdown, layouts as layouts, scale as scale, tornado as tornado

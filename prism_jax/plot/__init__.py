from ._breakdown import breakdown as breakdown
from ._cdf import cdf as cdf
from ._chrome_trace import chrome_trace as chrome_trace, save_chrome_trace as save_chrome_trace
from ._gantt import gantt as gantt
from ._heat_map import heat_map as heat_map
from ._histogram import histogram as histogram
from ._layouts import layouts as layouts
from ._memory import memory as memory
from ._qq import qq as qq
from ._scale import scale as scale
from ._tornado import tornado as tornado
from ._training_run import training_run as training_run

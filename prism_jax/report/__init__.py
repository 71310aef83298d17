from ._figures import check_matplotlib as check_matplotlib
from ._gather import MOST_STEPS as MOST_STEPS, gather as gather
from ._page import html_page as html_page, save_html as save_html
from ._report import Origin as Origin, Report as Report

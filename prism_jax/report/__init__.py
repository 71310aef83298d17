from ._gather import MOST_STEPS as MOST_STEPS, Report as Report, gather as gather
from ._html import check_matplotlib as check_matplotlib
from ._page import html_page as html_page, save_html as save_html

"""A recorded run as one HTML page that opens offline. numpy alone; knows nothing of torch or hooks."""

from hookstats.report.page import put
from hookstats.report.record import Recorded
from hookstats.report.writing import html

__all__ = ["Recorded", "html", "put"]

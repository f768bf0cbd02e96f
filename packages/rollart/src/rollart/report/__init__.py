"""The report of a run as one HTML file."""

from rollart.report.page import write_report

__all__ = ["write_report"]

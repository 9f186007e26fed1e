"""Metric sums, counters, the health watch, the console and the report page."""

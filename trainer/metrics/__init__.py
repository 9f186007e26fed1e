"""Metric sums, counters, the health monitor, the console and the report page."""

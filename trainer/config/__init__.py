"""Flags and YAML: shared option blocks, their checks, and how words become a Config."""

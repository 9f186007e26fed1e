"""python -m bench.scaling."""

from __future__ import annotations

import tyro

from bench.scaling.predict import main

if __name__ == "__main__":
    tyro.cli(main)

"""Write the tables of docs/from_axolotl.md and docs/from_trl.md: python -m trainer.translate --write.

Without --write the exit code reports whether they are up to date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainer.translate import trl
from trainer.translate.axolotl_table import SECTIONS
from trainer.translate.keys import Key

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("from_axolotl.md", "from_trl.md")
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(argv: list[str]) -> int:
    """Exit code: 0 if the pages are up to date or were written, 1 if they are not."""
    stale = [page for page in PAGES if page_text(page) != (DOCS / page).read_text(encoding="utf-8")]
    for page in stale:
        if argv == ["--write"]:
            (DOCS / page).write_text(page_text(page), encoding="utf-8")
        print(f"docs/{page}: {'written' if argv == ['--write'] else 'its table is out of date'}")
    return 0 if argv == ["--write"] else int(bool(stale))


def page_text(page: str) -> str:
    """The page with its tables as the code has them."""
    made = {"axolotl": axolotl_tables, "trl": lambda: f"\n{_rows('field', trl.TABLE)}\n", "trl_defaults": trl_defaults}
    text = (DOCS / page).read_text(encoding="utf-8")
    return MARKED.sub(lambda found: f"{found[1]}{made[found[2]]()}{found[3]}", text)


def axolotl_tables() -> str:
    parts = []
    for title, table in SECTIONS.items():
        shown = {key: entry for key, entry in table.items()  # test_datasets and pretraining_dataset are as datasets
                 if key.startswith("datasets[]") or f"datasets[]{key.partition('[]')[2]}" not in table}  # fmt: skip
        parts.append(f"\n### {title}\n\n{_rows('key', shown)}")
    return "".join(parts) + "\n"


def trl_defaults() -> str:
    lines = ["| strop flag | TRL's default, which is set |", "|---|---|"]
    for name, value in trl.EVERYWHERE.items():
        lines.append(f"| `{name}` | {_shown(value)} |")
    for kind, values in trl.DEFAULTS.items():
        own = ", ".join(f"`{name}` {_shown(value)}" for name, value in values.items() if name not in trl.EVERYWHERE)
        lines.append(f"| {kind} | {own} |")
    for title, values in (("with `use_peft`", trl.LORA_DEFAULTS), ("with `use_vllm`", trl.VLLM_DEFAULTS)):
        lines.append(f"| {title} | {', '.join(f'`{name}` {_shown(value)}' for name, value in values.items())} |")
    return "\n".join(["", *lines, "", ""])


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def _rows(what: str, table: Mapping[str, Key]) -> str:
    """A row for each outcome and text, with all its keys, in the order of the outcomes."""
    grouped: dict[Key, list[str]] = {}
    for key, entry in table.items():
        grouped.setdefault(entry, []).append(key)
    lines = [f"| {what} | outcome | |", "|---|---|---|"]
    for outcome in ("translated", "no effect", "rejected"):
        lines += [
            f"| {_listed(keys)} | {'no equivalent' if what == 'field' and outcome == 'rejected' else outcome} | "
            f"{entry.text} |"
            for entry, keys in grouped.items() if entry.outcome == outcome
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in sorted(keys, key=lambda key: (key.endswith(".*"), key)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

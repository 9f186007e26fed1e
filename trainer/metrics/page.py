"""A self-contained HTML page: no scripts, no network."""

from __future__ import annotations

import os
from collections.abc import Iterable
from html import escape
from pathlib import Path

from data.errors import UserError


def write_page(path: Path, page: str) -> Path:
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        temporary.write_bytes(page.encode("utf-8", errors="replace"))
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); fix the permissions or copy the run") from None
    return path


def page_html(title: str, parts: Iterable[str]) -> str:
    style = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    # forbid scripts and the network, in case an escape is ever missing
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title>\n<style>\n{style}</style></head>\n"
        "<body><main>\n" + "\n".join(part for part in parts if part) + "\n</main></body></html>\n"
    )


def text(value: object) -> str:
    """Escape markup and control characters."""
    shown = "".join(c if c.isprintable() or c in "\n\t " else repr(c)[1:-1] for c in str(value))
    return escape(shown)


def details_html(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>{body}</details>" if body else ""

"""What a vLLM server's log says: how far its start is, and why it failed."""

from __future__ import annotations

import re
from pathlib import Path

TAIL_BYTES = 2**18
LONGEST = 240  # characters of a cause

# The one found last in the log names what the server is busy with.
PHASES = (
    (re.compile(r"Resolved architecture|non-default args"), "reading the model's config"),
    (re.compile(r"Initializing a V1 LLM engine|Starting EngineCore|world_size=\d+ rank="), "starting the engine"),
    (re.compile(r"Starting to load model|Loading safetensors|Loading weights"), "loading weights"),
    (re.compile(r"Loading weights took|Model loading took"), "setting up memory"),
    (re.compile(r"Dynamo bytecode transform|Compiling a graph"), "compiling"),
    (re.compile(r"Capturing CUDA graphs|Graph capturing"), "capturing CUDA graphs"),
    (re.compile(r"init engine|Available routes|Application startup"), "opening its port"),
)
# "(EngineCore pid=7) ERROR 11-15 07:58:37 [core.py:9] " and the like
PREFIX = re.compile(
    r"^(?:\([\w-]+(?: [\w-]+=\S+)*\)\s*)?(?:(?:ERROR|WARNING|INFO|DEBUG|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\]\s?)?"
)
ERROR = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Exit|Failure))\b:?\s*(.*)$")
USAGE = re.compile(r"^\S+: error: (.*)$")  # argparse
VALIDATION = re.compile(r"^\s+(?:Value error|Assertion failed), (.*?)(?: \[type=.*)?$")  # pydantic
TAKEN = re.compile(r"Address already in use|address already in use")
ECHOES = ("Engine core initialization failed", "WorkerProc initialization failed", "Engine process failed to start",
          "cancelled", "EngineCore failed")  # fmt: skip


def read_tail(path: Path) -> str:
    """The end of a log that may be long."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def phase_of(text: str) -> str:
    """What a server is busy with, in words."""
    found = [(match.start(), words) for pattern, words in PHASES for match in pattern.finditer(text)]
    return max(found)[1] if found else "importing vLLM"


def is_port_taken(text: str) -> bool:
    return TAKEN.search(text) is not None


def cause_of(text: str) -> str:
    """The line that says best why a server ended: its first error that is not an echo of another process's."""
    lines = [PREFIX.sub("", line) for line in text.splitlines()]
    for line in lines:
        found = USAGE.match(line) or VALIDATION.match(line)
        if found:
            return _shortened(found[1].strip())
    errors = [found for line in lines if (found := ERROR.match(line))]
    told = [found for found in errors if found[2] and not any(echo in found[2] for echo in ECHOES)]
    if told:
        return _shortened(f"{told[0][1]}: {told[0][2].strip()}")
    if errors:
        return errors[0][0].strip()
    return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")


def _shortened(text: str) -> str:
    """Its first sentences: vLLM goes on with advice about variables to set."""
    if len(text) <= LONGEST:
        return text
    end = text.rfind(". ", 0, LONGEST)
    return text[:end] if end > 0 else text[:LONGEST] + "..."

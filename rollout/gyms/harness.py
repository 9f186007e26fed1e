"""--harness: a program runs for each completion, with the policy as the model that it calls.

    harness = Harness(ToolConfig(harness="python agent.py {row}"))
    harness.open(run_dir / "harness")
    source = harness.source(endpoint, sampling)         # a Source: one process per request

The program gets the endpoint's address and key in its environment (OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL,
ANTHROPIC_API_KEY) and in the placeholders {base_url} and {api_key}; {row} is a JSON file with the row's prompt and
columns, {prompt} the text of the prompt's last message. It runs without a shell, in a new folder. Reward functions get
its output and its folder as the columns `stdout` and `folder`; the folder is deleted with the rollout. A program that
fails or runs too long has no reward, unless its conversation has used up its tokens.

Each program is a child of servers/worker/strop_guard.py, so it ends with the run, even after kill -9, together with all
processes of its group.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

from data.errors import UserError
from data.types import Prompt
from data.user_code import printable
from rollout.engine import Completion, Request, Sampling
from rollout.episodes.endpoint import Endpoint
from rollout.episodes.options import ToolConfig
from rollout.gyms.auto_start import clean_env
from rollout.gyms.gym_source import EpisodeError, GymSource, log_too_long, once_per_kind
from rollout.schedule.replay import is_json
from rollout.servers.command import WORKER
from rollout.servers.launch import cause_of, read_tail


class Folder(str):
    """The path of a program's folder, which is deleted with the last reference to this object."""


class Harness:
    columns = ("num_turns", "tool_calls", "branches", "env_failed", "stdout", "folder")  # of the completions

    def __init__(self, cfg: ToolConfig, *, log: Callable[[str], None] = print) -> None:
        assert cfg.harness is not None, cfg
        self.cfg, self.argv, self.log_once = cfg, read_command(cfg.harness), once_per_kind(log)
        self.folder: Path | None = None
        self._numbers = itertools.count(1)
        self._slots = asyncio.Semaphore(cfg.harness_max_concurrent)

    def open(self, folder: Path) -> None:
        """Set the folder of the programs' folders, and empty it after a run that was killed."""
        self.folder = folder.absolute()
        self.close()

    def source(self, endpoint: Endpoint | None, sampling: Sampling) -> GymSource:
        """Return a source; `endpoint` is None on ranks that never start it."""
        return GymSource(
            partial(self._play, sampling), endpoint, flag="harness", title="harness", log_once=self.log_once,
            all_may_fail=False,
            hint="run the program by hand; lines above that begin with 'harness:' show the first failure of each kind",
        )  # fmt: skip

    def close(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    async def _play(self, sampling: Sampling, endpoint: Endpoint, request: Request, index: int) -> Completion:
        assert request.prompt is not None and self.folder is not None
        async with self._slots:
            parent = self.folder / str(next(self._numbers))
            folder = new_folder(parent)
            with endpoint.session(sampling, seed=request.seed, settings=request.prompt.settings) as (session, key):
                failure = await self._run(request.prompt, parent, endpoint.url, key)
        columns = {"stdout": read_tail(parent / "stdout.txt"), "folder": folder}
        if failure is None and not session.turns:
            failure = "no turn", "the program ended without an answer from the policy; make it use OPENAI_BASE_URL"
        if failure is not None and not session.is_full:  # otherwise it failed because it got no more tokens
            text = f"{failure[1]}; a request was rejected: {session.rejected}" if session.rejected else failure[1]
            raise EpisodeError(text, kind=failure[0], columns=columns)
        log_too_long(self.log_once, "harness", request.prompt, session)
        return session.completion(request.prompt.ids, columns | {"env_failed": 0.0})

    async def _run(self, prompt: Prompt, parent: Path, url: str, key: str) -> tuple[str, str] | None:
        """Run the program to its end; return a kind and a text if it fails or runs too long."""
        row = {name: value for name, value in prompt.columns.items() if is_json(value)} | {"prompt": prompt.prompt}
        (parent / "row.json").write_text(json.dumps(row))
        text = prompt.prompt if isinstance(prompt.prompt, str) else prompt.prompt[-1]["content"]
        values = {"{base_url}": url, "{api_key}": key, "{row}": str(parent / "row.json"), "{prompt}": text}
        env = clean_env() | {
            "OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key,
        }  # fmt: skip
        guard = [sys.executable, str(WORKER / "strop_guard.py"), "--", *fill(self.argv, values)]
        with (parent / "stdout.txt").open("wb") as out, (parent / "stderr.txt").open("wb") as err:
            try:
                process = await asyncio.create_subprocess_exec(
                    *guard, stdin=asyncio.subprocess.PIPE, stdout=out, stderr=err, cwd=parent / "work", env=env,
                    start_new_session=True,
                )  # fmt: skip
            except (OSError, ValueError) as error:  # a prompt that is too long for the command, or contains NUL
                return "start", f"the program cannot be started ({error}); pass it {{row}} instead of {{prompt}}"
        try:
            async with asyncio.timeout(self.cfg.harness_timeout):
                status = await process.wait()
        except TimeoutError:
            return "late", f"the program exceeded harness_timeout={self.cfg.harness_timeout:g} s"
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)  # the guard ends the whole group within a second or so
                await process.wait()
        if not status:
            return None
        cause = cause_of(read_tail(parent / "stderr.txt") or "it wrote nothing to stderr")
        return f"exit {status}", f"exit status {status} ({printable(cause[:300])})"


def new_folder(parent: Path) -> Folder:
    """Create the folder `work` in parent; parent is deleted with the last reference to the result."""
    folder = Folder(parent / "work")
    os.makedirs(folder)
    weakref.finalize(folder, shutil.rmtree, parent, ignore_errors=True)
    return folder


def read_command(command: str) -> list[str]:
    """Split the command into words; files that it names relative to the working folder become absolute."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"harness={command}: cannot be split into words ({error}); check the quotes") from None
    if not words:
        raise UserError("harness='': empty; pass a command such as 'python agent.py {row}'")
    program = shutil.which(words[0])
    if program is None:
        raise UserError(f"harness={command}: {words[0]} is not a program; check the name")
    return [os.path.abspath(program), *(os.path.abspath(word) if os.path.exists(word) else word for word in words[1:])]


def fill(argv: list[str], values: dict[str, str]) -> list[str]:
    """Replace the placeholders in each word; other braces, and braces in the values, are kept."""
    pattern = re.compile("|".join(map(re.escape, values)))
    return [pattern.sub(lambda match: values[match[0]], word) for word in argv]

"""python -m trainer.push RUN REPO: upload the model of a finished run to the hub, with a model card.

    python -m trainer.push runs/grpo-20261115-093000 me/my-model
    python -m trainer.push runs/grpo-20261115-093000 me/my-model --out folder      # write the folder, upload nothing

The folder contains the exported model, README.md (trainer/metrics/card.py) and metrics.jsonl. Prompts, completions and
local paths are not uploaded, unless --with-report adds report.html, which shows samples and all settings.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from data.command.flags import parse_command, run_command
from data.errors import UserError
from rollout.model_folder import BUILTIN
from trainer.files.atomic_folder import atomic_folder
from trainer.metrics.card import HUB_ID, is_hub_id, model_card
from trainer.report import defaults_of
from trainer.run.export import change_json


@dataclass(frozen=True, kw_only=True)
class PushConfig:
    """Upload the model of a finished run to the hub, with a model card."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of a finished run."""
    repo: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="REPO")]
    """Hub repository, OWNER/NAME; created if it does not exist."""
    out: str | None = None
    """Write the files to this folder instead of uploading them."""
    private: bool = False
    """Create a private repository."""
    base_model: str | None = None
    """Hub id of the base model, if the run loaded it from a local folder."""
    license: str | None = None
    """License for the model card, such as apache-2.0. Must be compatible with the base model's."""
    with_report: bool = False
    """Also upload report.html, which shows samples and every setting."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 after a one-line error."""
    return run_command(lambda: push(parse_command(PushConfig, argv, "python -m trainer.push")))


def push(cfg: PushConfig) -> None:
    if not HUB_ID.fullmatch(cfg.repo):
        raise UserError(f"repo={cfg.repo}: must be OWNER/NAME")
    if cfg.out is not None:
        out = Path(cfg.out).expanduser()
        if out.exists():
            raise UserError(f"out={cfg.out}: already exists; choose a new folder")
        with atomic_folder(out, "out") as folder:
            fill(cfg, folder)
        print(f"{out}: ready; upload it with `hf upload {cfg.repo} {out}`")
        return
    with tempfile.TemporaryDirectory(prefix="strop-push-") as name:
        fill(cfg, Path(name))
        print(upload(cfg, Path(name)))


def fill(cfg: PushConfig, folder: Path) -> None:
    """Write the files to upload."""
    run = Path(cfg.run).expanduser()
    if not (run / "config.yaml").is_file():
        raise UserError(f"run={cfg.run}: not a run folder (no config.yaml); pass a run's --output-dir")
    if not (run / "final").is_dir():
        raise UserError(
            f"run={cfg.run}: has not finished (no final/); resume it, or export a checkpoint with "
            "python -m trainer.export"
        )
    shutil.copytree(run / "final", folder, dirs_exist_ok=True)
    adapter = folder / "adapter_config.json"
    base = cfg.base_model
    if adapter.is_file():
        named = str(json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"])
        builtin = [name for name, path in BUILTIN.items() if named in (name, str(path))]
        if base is None and builtin:
            raise UserError(
                f"run={cfg.run}: the adapter's base {builtin[0]} is part of strop and not on the hub; upload a folder "
                "written with python -m trainer.export --merge-lora"
            )
        if base is None and not is_hub_id(named, run):
            raise UserError(
                f"run={cfg.run}: the adapter's base model is a local folder; pass its hub id with --base-model, or "
                "merge it with python -m trainer.export --merge-lora"
            )
        change_json(adapter, base_model_name_or_path=base or named)
    card = model_card(run, cfg.repo, base_model=base, license=cfg.license, defaults=defaults_of(run))
    (folder / "README.md").write_text(card, encoding="utf-8")
    if (run / "metrics.jsonl").is_file():
        shutil.copy(run / "metrics.jsonl", folder / "metrics.jsonl")
    if cfg.with_report:
        if not (run / "report.html").is_file():
            raise UserError(f"with_report=True: {cfg.run} has no report.html; write it with python -m trainer.report")
        shutil.copy(run / "report.html", folder / "report.html")


def upload(cfg: PushConfig, folder: Path) -> str:
    """Upload the folder and return the address of the repository."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    instead = f"write the folder with --out and upload it later with `hf upload {cfg.repo} FOLDER`"
    try:
        api = HfApi()
        api.create_repo(cfg.repo, private=cfg.private, exist_ok=True)
        api.upload_folder(repo_id=cfg.repo, folder_path=folder, commit_message=f"Upload {Path(cfg.run).name}")
    except LocalTokenNotFoundError:
        raise UserError(f"repo={cfg.repo}: not logged in to the hub; run `hf auth login`, or {instead}") from None
    except Exception as error:
        # By name: the hub's client raises httpx's TransportError or, since its version 2, httpx2's.
        is_network_error = any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
        if not isinstance(error, (OfflineModeIsEnabled, HfHubHTTPError, ConnectionError)) and not is_network_error:
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"repo={cfg.repo}: upload failed ({reason}); {instead}") from None
    return f"https://huggingface.co/{cfg.repo}"


if __name__ == "__main__":
    sys.exit(main())

"""Check that a model or dataset can be loaded from the hub before downloading: the hub's client retries for a minute.

check_hub("model", "no-such/model")      # UserError: no such folder, and the hub is unreachable
"""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path

from data.errors import UserError

WAIT_S = 5.0  # timeout for the hub's first answer
KINDS = {  # setting -> (kind of repository, local equivalent, advice)
    "model": ("model", "folder", "pass a hub id, a model folder or a finished run folder"),
    "tokenizer": ("model", "folder", "pass a hub id or a folder with a tokenizer"),
    "data": ("dataset", "local file", "check the path"),
}


def is_path(name: str) -> bool:
    """Return whether a name is a path rather than a hub id; runs/ is the default folder of runs."""
    return name.startswith((".", "/", "~", "runs/")) or name.count("/") > 1 or Path(name).exists()


def check_hub(setting: str, name: str, label: str = "") -> None:
    """Raise if a name that is not a local folder cannot be a hub id, or if the hub is unreachable.

    If it is unreachable but the local cache has a copy, switch off downloads in this process. `label` starts the error
    if the setting is not just the name.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import validate_repo_id

    kind, local, advice = KINDS[setting]
    label = label or f"{setting}={name}"
    if is_path(name):
        raise UserError(f"{label}: no such {local}; {advice}")
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise UserError(f"{label}: no such {local}, and not a hub id; {advice}") from None
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)
    if not reason:
        return
    if (Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)).is_dir():
        constants.HF_HUB_OFFLINE = True
        return
    raise UserError(
        f"{label}: no such {local}, not in the hub cache, and the hub is unreachable ({reason}); check the "
        "path or the network"
    )


@cache
def unreachable(endpoint: str) -> str:
    """Return why the hub does not answer within a few seconds; "" if it answers at all."""
    import httpx

    reasons = [f"no answer from {endpoint} within {WAIT_S:g} s"]

    def request() -> None:
        try:
            httpx.head(endpoint, timeout=WAIT_S)
            reasons.append("")
        except httpx.HTTPError as error:
            reasons.append(f"{endpoint}: {error}")
        except Exception:  # such as a proxy that httpx cannot use: the hub's client may support it, or reports it
            reasons.append("")

    thread = threading.Thread(target=request, daemon=True)  # a name lookup may take longer than the timeout
    thread.start()
    thread.join(WAIT_S)
    return reasons[-1]

"""Whether a model or dataset can come from the hub, asked before a download: the hub's client retries for a minute.

check_hub("model", "no-such/model")      # ValueError: no folder of that name, and the hub cannot be reached
"""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path

from data.errors import UserError

WAIT_S = 5.0  # for the hub's first answer
KINDS = {  # setting -> kind of repository, what it may be here, what to pass
    "model": ("model", "folder", "pass a hub id, a model folder or a finished run folder"),
    "data": ("dataset", "local file", "check the path"),
}


def check_hub(setting: str, name: str) -> None:
    """Refuse a name that is no folder here and cannot be a hub id, or whose hub cannot be reached.

    Without a network, a copy in the local cache is used: downloads are switched off for this process.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    kind, what, else_ = KINDS[setting]
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists():
        raise UserError(f"{setting}={name}: no such {what}; {else_}")
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)
    if not reason:
        return
    if (Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)).is_dir():
        constants.HF_HUB_OFFLINE = True
        return
    raise UserError(
        f"{setting}={name}: is no {what} here, nor in the cache of the hub, which cannot be reached ({reason}); check "
        "the path, or download it where there is a network"
    )


@cache
def unreachable(endpoint: str) -> str:
    """Why the hub does not answer within a few seconds; empty if it does, whatever the answer."""
    import httpx

    found = [f"no answer from {endpoint} within {WAIT_S:g} s"]

    def ask() -> None:
        try:
            httpx.head(endpoint, timeout=WAIT_S)
            found.append("")
        except httpx.HTTPError as error:
            found.append(f"{endpoint}: {error}")
        except Exception:  # such as a proxy that httpx cannot use: the hub's own client may, and says so if not
            found.append("")

    asking = threading.Thread(target=ask, daemon=True)  # looking up a name may wait longer than any timeout
    asking.start()
    asking.join(WAIT_S)
    return found[-1]

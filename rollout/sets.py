"""The ids from which each token of a completion was sampled, if top-k, top-p or min-p limited them.

    [~9, 4, 7, ~4, ~9, 2]        # an int32 array: token 9 from {4, 7, 9}, then 4 from {4}, then 9 from {2, 9}

A set starts with its sampled token as ~id, which is negative (kernels/decode/draw_set.py). Tokens that the model did
not sample have no set. The trainer's softmax runs over the same ids: the (N, K) target of kernels/linear_logprob.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.errors import UserError

LIMIT = 1024  # ids per set


def join(parts: Sequence[np.ndarray], count: int, limit: int = LIMIT) -> np.ndarray | None:
    """Join the parts of a completion and keep its first `count` sets; None if there are no parts.

    `limit`: ids per set that the sampler is sure to have recorded.
    """
    if not parts:
        return None
    sets = np.concatenate(parts)
    starts = np.append(np.flatnonzero(sets < 0), len(sets))
    assert len(starts) > count, f"{len(starts) - 1} sets for {count} tokens"
    sizes = np.diff(starts[: count + 1])
    if sizes.max(initial=0) > limit:
        raise UserError(
            f"token {int(sizes.argmax())} of a completion: sampled from {sizes.max():,} ids or more (at most {limit:,} "
            f"can be recorded for training); set --top-k to {limit} or less, lower --top-p or raise --min-p"
        )
    return sets[: starts[count]]

"""Seeds of policy calls, hashed from what identifies the call."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int) -> int:
    """A seed in [0, 2**31) fixed by whole numbers, such as (run seed, tree, node, attempt): siblings differ, replays repeat.

    Example:
        >>> derive_seed(0, 1, 2, 0) == derive_seed(0, 1, 2, 0) != derive_seed(0, 1, 2, 1)
        True
    """
    digest = hashlib.blake2b(",".join(str(int(p)) for p in parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF

"""Options of the subcommands that run a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(kw_only=True)
class ServeOptions:
    """Options of ``lightning serve-reward``, whose help describes them."""

    words: Sequence[str]
    host: str
    port: int
    token: str | None
    device: str | None
    batch_size: int
    max_request_mb: int
    max_images: int
    max_megapixels: int

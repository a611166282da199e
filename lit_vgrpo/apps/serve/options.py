"""Options of the subcommands that run a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(kw_only=True)
class ServeOptions:
    """Options of ``lightning serve-reward``, whose help describes them."""

    words: Sequence[str]
    host: str = LOOPBACK
    port: int = 8000
    token: str | None = None
    device: str | None = None
    batch_size: int = 32
    max_request_mb: int = 64
    max_images: int = 256
    max_megapixels: int = 4

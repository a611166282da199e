"""Options of ``lightning serve-reward``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from lit_vgrpo.errors import UserError
from lit_vgrpo.rewards.connection import is_loopback
from lit_vgrpo.rewards.protocol import MEGAPIXEL, Limits

LOOPBACK = "127.0.0.1"
MEGABYTE = 1_000_000


def read_token(variable: str) -> str:
    """Return the text of an environment variable; raise UserError if it is not set."""
    token = os.environ.get(variable, "").strip()
    if not token:
        raise UserError(f"{variable} is not set in the environment. Run: export {variable}=...")
    return token


@dataclass(kw_only=True)
class ServeOptions:
    """Options of ``lightning serve-reward``, whose help describes them."""

    words: Sequence[str]
    host: str = LOOPBACK
    port: int = 8000
    token: str | None = None
    device: str | None = None
    batch_size: int = 32
    max_wait_ms: int = 5
    max_request_mb: int = 64
    max_images: int = 256
    max_megapixels: int = 4

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the server."""
        return is_loopback(self.host)

    @property
    def max_request_bytes(self) -> int:
        """Bytes of a request, at most."""
        return self.max_request_mb * MEGABYTE

    @property
    def limits(self) -> Limits:
        """Limits of the content of a request."""
        return Limits(self.max_images, self.max_megapixels * MEGAPIXEL)

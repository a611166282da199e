"""Options of the subcommands that serve something."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from lit_vgrpo.config.arguments import Options, option, whole
from lit_vgrpo.errors import UserError

LOOPBACK = "127.0.0.1"
MOST_MEGAPIXELS = 85
"""Of an image that Pillow does not take for a decompression bomb."""
MOST_PORT = 65535


def read_token(variable: str) -> str:
    """Return the text of an environment variable; raise UserError if it is not set."""
    token = os.environ.get(variable, "").strip()
    if not token:
        raise UserError(f"{variable} is not set in the environment. Run: export {variable}=...")
    return token


@dataclass(kw_only=True)
class ServeOptions(Options):
    """Options of ``lightning serve-reward``; the words are a reward and its options, or a recipe.

    Attributes:
        host: Address to listen on; loopback only by default.
        port: Port to listen on; 0 takes a free one.
        token: Environment variable with the secret that requests must carry; without it all are accepted.
        device: Device of the reward; ``None`` takes the first GPU if there is one.
        batch_size: Maximum number of images per call of the reward.
        max_wait_ms: Time that a request waits for others to be scored with it.
        max_request_mb: Maximum size of a request in megabytes.
        max_images: Maximum number of images per request.
        max_megapixels: Maximum size of an image.
    """

    subcommand: ClassVar[str] = "serve-reward"

    host: str = option(LOOPBACK)
    port: int = whole(8000, least=0, most=MOST_PORT)
    token: str | None = option(read=read_token, name="token-env")
    device: str | None = option()
    batch_size: int = whole(32)
    max_wait_ms: int = whole(5, least=0)
    max_request_mb: int = whole(64)
    max_images: int = whole(256)
    max_megapixels: int = whole(4, most=MOST_MEGAPIXELS)

    def __post_init__(self) -> None:
        if not self.words:
            raise UserError("No reward given. Try: lightning serve-reward PickScore")

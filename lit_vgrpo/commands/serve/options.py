"""What was typed after ``lightning serve-reward``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from lit_vgrpo.config.arguments import split_words, whole_number
from lit_vgrpo.errors import UserError
from lit_vgrpo.rewards.connection import is_loopback
from lit_vgrpo.rewards.protocol import MEGAPIXEL, Limits

LOOPBACK = "127.0.0.1"
MEGABYTE = 1_000_000
MOST_MEGAPIXELS = 85
"""Of an image that Pillow does not take for a decompression bomb."""
NUMBERS = {
    "port": (8000, 0),
    "batch-size": (32, 1),
    "max-wait-ms": (5, 0),
    "max-request-mb": (64, 1),
    "max-images": (256, 1),
    "max-megapixels": (4, 1),
}
"""Options that are whole numbers: default and least value."""
VALUES = ("host", "token-env", "device", *NUMBERS)


@dataclass(frozen=True)
class ServeOptions:
    """The parsed command line.

    Attributes:
        host: address to listen on; loopback only, unless another was asked for.
        port: 0 takes a free one.
        token: what requests must bring along; None lets everybody in.
        device: where images are scored; None takes the first GPU where there is one.
        batch_size: most images that are scored in one call of the reward.
        max_wait_ms: how long a request waits for others to be scored with it.
        max_request_bytes: larger requests are refused while they are read.
        limits: what a request may hold.
        reward_words: the reward and its options, or a recipe.
    """

    host: str
    port: int
    token: str | None
    device: str | None
    batch_size: int
    max_wait_ms: int
    max_request_bytes: int
    limits: Limits
    reward_words: list[str]

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)


def parse_options(args: Sequence[str]) -> ServeOptions:
    """Take our options out of the words; the rest names the reward.

    Raises:
        UserError: with every fault of the options that was found.
    """
    given, rest = split_words(args, "serve-reward", VALUES, ())
    faults: list[str] = []
    numbers = {
        name: whole_number(name, given.get(name, str(default)), least, default, faults)
        for name, (default, least) in NUMBERS.items()
    }
    if numbers["port"] > 65535:
        faults.append(f"--port {numbers['port']} is no port. Use 1 to 65535, or 0 for a free one.")
    if numbers["max-megapixels"] > MOST_MEGAPIXELS:
        faults.append(f"--max-megapixels {numbers['max-megapixels']} is too large. Use {MOST_MEGAPIXELS} or less.")
    token = None
    if "token-env" in given:
        token = os.environ.get(given["token-env"], "").strip()
        if not token:
            faults.append(
                f"--token-env {given['token-env']} is not set in the environment. Run: export {given['token-env']}=..."
            )
    if not rest:
        faults.append("No reward given. Try: lightning serve-reward PickScore")
    if faults:
        raise UserError(*faults)
    return ServeOptions(
        host=given.get("host", LOOPBACK),
        port=numbers["port"],
        token=token,
        device=given.get("device"),
        batch_size=numbers["batch-size"],
        max_wait_ms=numbers["max-wait-ms"],
        max_request_bytes=numbers["max-request-mb"] * MEGABYTE,
        limits=Limits(numbers["max-images"], numbers["max-megapixels"] * MEGAPIXEL),
        reward_words=rest,
    )

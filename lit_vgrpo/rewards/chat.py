"""The base of rewards from a vision-language model behind OpenAI's chat completions, such as vLLM's."""

from __future__ import annotations

import base64
import warnings
from collections.abc import Sequence
from typing import Any

from lit_vgrpo.errors import one_line
from lit_vgrpo.rewards.connection import Connection
from lit_vgrpo.rewards.http import CONNECT_TIMEOUT_S, RemoteReward
from lit_vgrpo.rewards.servers import Server, with_path
from lit_vgrpo.system.hub import LoadError


class ChatReward(RemoteReward):
    """A reward that asks a vision-language model, by the server's name, at an address such as ``http://host:8000/v1``."""

    def __init__(self, url: str | list[str], model: str, connection: Connection | None) -> None:
        super().__init__(url, connection, "/chat/completions")
        self.model = model

    def load(self) -> None:
        """Ask each server for its models; warn of those that do not answer, or raise LoadError if none does."""
        import httpx

        errors = []
        for server in map(Server, self._servers.urls):
            try:
                server.options = self.connection.client_options(server.url, self.option)
                options = {"timeout": CONNECT_TIMEOUT_S, **server.options}
                with httpx.stream("GET", with_path(server.url, "/models"), **options) as answer:
                    if not answer.is_success:  # nothing else of the answer is needed, or read
                        raise httpx.HTTPError(f"status {answer.status_code}")
            except (httpx.HTTPError, ValueError) as error:
                reason = one_line(error) or type(error).__name__
                errors.append(f"{self.option('url')}={server.shown} does not answer ({reason}).")
        if len(errors) == len(self._servers.urls):
            start = f"Run: pip install vllm && vllm serve {self.model}, or set {self.option('url')} to another server."
            raise LoadError(f"{errors[0]} {start}")
        for line in errors:
            warnings.warn(f"{line} It is left out until it does.", stacklevel=2)

    def _request(self, pictures: Sequence[bytes], text: str, **sampling: Any) -> dict[str, Any]:
        """Return the body of a request with PNG files and a text after them."""
        addresses = ["data:image/png;base64," + base64.b64encode(picture).decode() for picture in pictures]
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": address}} for address in addresses]
        content.append({"type": "text", "text": text})
        messages = [{"role": "user", "content": content}]
        return {"json": {"model": self.model, "messages": messages, "temperature": 0.0, "seed": 0, **sampling}}

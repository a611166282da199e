"""The base of rewards from a vision-language model behind OpenAI's chat completions, such as vLLM's."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from lit_vgrpo.errors import one_line
from lit_vgrpo.rewards.http import CONNECT_TIMEOUT_S, Connection, RemoteReward
from lit_vgrpo.system.hub import LoadError


class ChatReward(RemoteReward):
    """A reward that asks a vision-language model.

    Args:
        url: Address of the API, such as ``http://127.0.0.1:8000/v1``.
        model: The server's name of the model.
        connection: Timeouts, retries, simultaneous requests, and the token.
    """

    def __init__(self, url: str, model: str, connection: Connection | None) -> None:
        self.url = url.rstrip("/")
        super().__init__(f"{self.url}/chat/completions", connection)
        self.model = model

    def load(self) -> None:
        """Ask the server for its models.

        Raises:
            LoadError: The server does not answer.
        """
        import httpx

        try:
            httpx.get(f"{self.url}/models", timeout=CONNECT_TIMEOUT_S, **self._client_options()).raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            where = f"{self.option('url')}={self._shown.removesuffix('/chat/completions')}"
            start = f"Run: pip install vllm && vllm serve {self.model}, or set {self.option('url')} to another server."
            raise LoadError(f"{where} does not answer ({one_line(error)}). {start}") from error

    def _request(self, pictures: Sequence[bytes], text: str, **sampling: Any) -> dict[str, Any]:
        """Return the body of a request with PNG files and a text after them."""
        addresses = ["data:image/png;base64," + base64.b64encode(picture).decode() for picture in pictures]
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": address}} for address in addresses]
        content.append({"type": "text", "text": text})
        messages = [{"role": "user", "content": content}]
        return {"json": {"model": self.model, "messages": messages, "temperature": 0.0, "seed": 0, **sampling}}

"""The base of rewards from a vision-language model behind OpenAI's chat completions, such as vLLM's."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from lit_vgrpo.errors import one_line
from lit_vgrpo.rewards.connection import Connection, shown_address
from lit_vgrpo.rewards.http import CONNECT_TIMEOUT_S, RemoteReward
from lit_vgrpo.system.hub import LoadError

ENDPOINT = "/chat/completions"


class ChatReward(RemoteReward):
    """A reward that asks a vision-language model, by the server's name, at an address such as ``http://host:8000/v1``."""

    def __init__(self, url: str, model: str, connection: Connection | None) -> None:
        super().__init__(url, connection, ENDPOINT)
        self.model = model

    def load(self) -> None:
        """Ask the server for its models; raise LoadError if it does not answer, or cannot be asked."""
        import httpx

        try:
            options = {"timeout": CONNECT_TIMEOUT_S, **self._client_options()}
            with httpx.stream("GET", self._url.replace(ENDPOINT, "/models"), **options) as answer:
                if not answer.is_success:  # nothing else of the answer is needed, or read
                    raise httpx.HTTPError(f"status {answer.status_code}")
        except (httpx.HTTPError, ValueError) as error:
            where = f"{self.option('url')}={shown_address(self.url)}{self._route}"
            start = f"Run: pip install vllm && vllm serve {self.model}, or set {self.option('url')} to another server."
            reason = one_line(error) or type(error).__name__
            raise LoadError(f"{where} does not answer ({reason}). {start}") from error

    def _request(self, pictures: Sequence[bytes], text: str, **sampling: Any) -> dict[str, Any]:
        """Return the body of a request with PNG files and a text after them."""
        addresses = ["data:image/png;base64," + base64.b64encode(picture).decode() for picture in pictures]
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": address}} for address in addresses]
        content.append({"type": "text", "text": text})
        messages = [{"role": "user", "content": content}]
        return {"json": {"model": self.model, "messages": messages, "temperature": 0.0, "seed": 0, **sampling}}

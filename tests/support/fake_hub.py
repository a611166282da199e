"""A small model hub in memory, in place of the requests that huggingface_hub's client makes."""

from unittest import mock

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError


class FakeHub:
    """Repositories as ``{name: {path: bytes}}``.

    Tokens: ``writes`` may write as the user somebody, ``reads`` may not write, others are not valid. Requests to
    another address, or offline, are left to the client.
    """

    address = "http://127.0.0.1:1"

    def __init__(self):
        self.repositories, self.private = {}, {}
        self.changes = []  # requests that change something, in order
        self._whoami = HfApi.whoami

    def __enter__(self):
        fakes = {name: getattr(self, name) for name in ("list_repo_files", "create_repo", "create_commit")}
        who = mock.patch.object(HfApi, "whoami", lambda api, **options: self.whoami(api, **options))
        self._patches = [who, mock.patch.multiple(HfApi, **fakes)]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self._patches:
            patch.stop()

    def whoami(self, api, **options):
        if self.address != constants.ENDPOINT or constants.HF_HUB_OFFLINE:
            return self._whoami(api, **options)
        self.allow("writes", "reads", refusal=401)
        return {"name": "somebody"}

    def list_repo_files(self, name):
        if name not in self.repositories:
            raise refused(404, RepositoryNotFoundError)
        return list(self.repositories[name])

    def create_repo(self, name, private, exist_ok):
        self.allow("writes", refusal=403)
        self.changes.append(f"create {name}")
        self.repositories[name], self.private[name] = {".gitattributes": b""}, private

    def create_commit(self, name, operations, commit_message):
        self.allow("writes", refusal=403)
        self.changes.append(f"commit {name}")
        for operation in operations:
            with operation.as_file() as file:
                self.repositories[name][operation.path_in_repo] = file.read()

    def allow(self, *tokens, refusal):
        if get_token() not in tokens:
            raise refused(refusal)


def refused(status, kind=HfHubHTTPError):
    """The client's error for a response with that status."""
    return kind("refused", response=mock.Mock(status_code=status, headers={}))

"""A small model hub on loopback: the requests that huggingface_hub makes to write and read a repository.

``python tests/support/fake_hub.py PORT`` serves it; then ``HF_ENDPOINT=http://127.0.0.1:PORT HF_TOKEN=writes`` use it.
"""

import base64
import json
import re
import sys
from hashlib import sha256

import huggingface_hub
from fault_server import FaultServer, Handler


class Pages(Handler):
    def do_GET(self):
        pages = {r"/api/whoami-v2": self.whoami, r"/api/models/(.+)/tree/[^/]+": self.tree}
        pages |= {r"/api/models/(.+)/revision/[^/]+": self.about}
        self.route({**pages, r"/(.+)/resolve/[^/]+/(.+)": self.file})

    do_HEAD = do_GET

    def do_POST(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.route(
            {
                r"/api/validate-yaml": lambda: self.answer({"errors": [], "warnings": []}),
                r"/api/repos/create": self.create,
                r"/api/models/(.+)/preupload/main": self.preupload,
                r"/(.+)\.git/info/lfs/objects/batch": self.batch,
                r"/api/models/(.+)/commit/main": self.commit,
            }
        )

    def do_PUT(self):
        self.body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.owner.large[self.path.rpartition("/")[2]] = self.body
        self.answer({})

    def route(self, pages):
        for pattern, page in pages.items():
            if found := re.fullmatch(pattern, self.path.partition("?")[0]):
                return page(*found.groups())
        return self.refuse(404, "EntryNotFound")

    def may(self, token):
        return self.headers.get("Authorization") == f"Bearer {token}"

    def whoami(self):
        known = self.may("writes") or self.may("reads")
        self.answer({"type": "user", "name": "somebody", "orgs": []}) if known else self.refuse(401)

    def about(self, name):
        names = [{"rfilename": path} for path in self.server.owner.repositories.get(name, ())]
        self.answer({"id": name, "sha": "1" * 40, "siblings": names}) if names else self.refuse(404, "RepoNotFound")

    def tree(self, name):
        files = self.server.owner.repositories.get(name)
        if files is None:
            return self.refuse(404, "RepoNotFound")
        entries = [{"type": "file", "path": path, "size": len(data), "oid": "0"} for path, data in files.items()]
        return self.answer(entries)

    def file(self, name, path):
        data = self.server.owner.repositories.get(name, {}).get(path)
        if data is None:
            return self.refuse(404, "EntryNotFound")
        if self.command == "GET":
            self.server.owner.read.append(f"{name}/{path}")
        return self.answer(data, headers={"ETag": sha256(data).hexdigest(), "X-Repo-Commit": "1" * 40})

    def create(self):
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
        if not self.may("writes"):
            return self.refuse(403)
        if name in self.server.owner.repositories:
            return self.answer({"url": f"{self.server.owner.address}/{name}", "name": name}, 409)
        self.server.owner.changes.append(f"create {name}")
        self.server.owner.repositories[name] = {".gitattributes": b""}
        self.server.owner.private[name] = asked.get("private", asked.get("visibility") == "private")
        return self.answer({"url": f"{self.server.owner.address}/{name}", "name": name})

    def preupload(self, name):
        if not self.may("writes"):
            return self.refuse(403)
        files = json.loads(self.body)["files"]
        modes = {True: "lfs", False: "regular"}
        entries = [
            {"path": path, "uploadMode": modes[path.endswith((".safetensors", ".png"))], "shouldIgnore": False}
            for path in (file["path"] for file in files)
        ]
        return self.answer({"files": entries})

    def batch(self, name):
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.server.owner.address}/lfs/{one['oid']}"}}}
            for one in json.loads(self.body)["objects"]
        ]
        self.answer({"transfer": "basic", "objects": objects})

    def commit(self, name):
        hub = self.server.owner
        hub.changes.append(f"commit {name}")
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                hub.repositories[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                hub.repositories[name][value["path"]] = hub.large[value["oid"]]
        self.answer({"commitUrl": f"{hub.address}/{name}/commit/1", "commitOid": "1", "success": True})

    def refuse(self, status, code=""):
        self.answer({"error": "refused"}, status, {"X-Error-Code": code} if code else {})

    def answer(self, body, status=200, headers=()):
        super().answer(body, status, {"Content-Type": "application/json", **dict(headers)})


class FakeHub(FaultServer):
    """Repositories as ``{name: {path: bytes}}``.

    Tokens: ``writes`` may write as the user somebody, ``reads`` may not write, others are not valid.
    """

    handler = Pages

    def __init__(self, port=0):
        super().__init__(at=("127.0.0.1", port))
        self.repositories = {}
        self.private = {}
        self.large = {}
        self.changes = []  # requests that change something, in order
        self.read = []  # files that were downloaded

    def use(self, monkeypatch, cache):
        """Let huggingface_hub in this process ask this hub, and keep files in a folder."""
        pages = "/{repo_id}/resolve/{revision}/{filename}"
        names = {"ENDPOINT": self.address, "HUGGINGFACE_CO_URL_TEMPLATE": self.address + pages}
        for name, value in {**names, "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(cache)}.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)


if __name__ == "__main__":
    hub = FakeHub(int(sys.argv[1]))
    print(hub.address, flush=True)
    hub.server.serve_forever()

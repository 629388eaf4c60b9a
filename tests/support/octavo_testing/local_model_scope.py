"""`LocalModelScope`: a server with the operations of ModelScope that downloads need. MODELSCOPE_ENDPOINT names it.

It has one repository, `org/model`, with the revisions `master` and `v1`. If `token` is set, a request without it is
refused.
"""

import hashlib
import json
from urllib.parse import parse_qs, urlsplit

from octavo_testing.file_server import FileServer, Handler

REPO = "org/model"


class _ModelScopeHandler(Handler):
    site: "LocalModelScope"

    def answer(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        root = f"/api/v1/models/{REPO}/repo"
        name = query.get("FilePath", "")
        if self.site.token and self.site.token not in str(self.headers):
            self._send_json(401, {"Code": 10010205001, "Message": "no permission", "Success": False})
        elif url.path not in (root, f"{root}/files") or query.get("Revision") not in ("master", "v1"):
            self._send_json(404, {"Code": 10010205001, "Message": "not found", "Success": False})
        elif url.path.endswith("/files"):
            rows = [
                {"Path": name, "Name": name, "Size": len(content), "Type": "blob", "Sha256": _sha256(content)}
                for name, content in self.site.files.items()
            ]
            self._send_json(200, {"Code": 200, "Success": True, "Data": {"Files": rows}})
        else:
            self.site.sent.append(name)
            self.send_file(self.site.files[name], X_Linked_Etag=_sha256(self.site.files[name]))

    def _send_json(self, status: int, value: object) -> None:
        self.send_whole(status, json.dumps(value).encode(), Content_Type="application/json")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class LocalModelScope(FileServer):
    """`sent`: names of the files that clients requested."""

    handler_class = _ModelScopeHandler

    def __init__(self) -> None:
        super().__init__()
        self.token = ""
        self.sent: list[str] = []

"""`LocalHub`: a server with the Hugging Face hub's API. The real client finds it by HF_ENDPOINT.

It has one repository, `org/model`, with one commit, which is `main` and `v1`. If `token` is set, a request without it
is refused with the status `refusal` and `error_code`.
"""

import json

from octavo_testing.file_server import FileServer, Handler

REPO = "org/model"


class _HubHandler(Handler):
    site: "LocalHub"

    def answer(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        if self.site.token and self.headers.get("Authorization") != f"Bearer {self.site.token}":
            self.send_whole(self.site.refusal, b"{}", X_Error_Code=self.site.error_code)
        elif path.startswith(f"api/models/{REPO}"):
            self._answer_api(path.removeprefix(f"api/models/{REPO}").strip("/").split("/"))
        elif path.startswith(f"{REPO}/resolve/{self.site.commit}/"):
            name = path.removeprefix(f"{REPO}/resolve/{self.site.commit}/")
            self.send_file(self.site.files[name], X_Repo_Commit=self.site.commit)
        else:
            self.send_whole(404, b"{}", X_Error_Code="RepoNotFound")

    def _answer_api(self, parts: list[str]) -> None:
        kind, revision = (*parts, "main")[:2]
        if revision not in ("main", "v1", self.site.commit):
            self.send_whole(404, b"{}", X_Error_Code="RevisionNotFound")
        elif kind == "tree":
            rows = [
                {"type": "file", "path": name, "size": len(content), "oid": f"{len(content):040x}"}
                for name, content in self.site.files.items()
            ]
            self._send_json(rows)
        else:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in self.site.files.items()]
            self._send_json({"id": REPO, "sha": self.site.commit, "siblings": siblings, "tags": []})

    def _send_json(self, value: object) -> None:
        self.send_whole(200, json.dumps(value).encode(), Content_Type="application/json")


class LocalHub(FileServer):
    handler_class = _HubHandler

    def __init__(self) -> None:
        super().__init__()
        self.commit = "a" * 40
        self.token, self.refusal, self.error_code = "", 401, "RepoNotFound"

"""A Hub on loopback: the protocol that huggingface_hub and transformers speak, over model repositories in memory.

Reading (info, tree, refs, commits, resolve with redirects, ranges and ETags) and writing (whoami, repositories, branches,
preupload, LFS, commits), with tokens and private repositories. A commit is what it is on the Hub: immutable, named by what
it holds, found by branch or by id.

    with Hub() as hub:
        commit = hub.add("org/name", folder)
        ...  # a process with HF_ENDPOINT=hub.url, or this one in the body of `client_of`
        assert hub.requests[-1].status == 200
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

import pytest


LFS_SUFFIXES = (".safetensors", ".bin", ".pt")
DAY = "2025-01-01T00:00:00.000Z"


@dataclass(frozen=True)
class Commit:
    """Files by path, behind a parent."""

    files: Mapping[str, bytes]
    message: str
    parent: str | None

    @property
    def oid(self) -> str:
        """40 hex digits, as git's."""
        digest = hashlib.sha1(f"{self.parent} {self.message}".encode())
        for path, data in sorted(self.files.items()):
            digest.update(f"{path} {len(data)} ".encode() + data)
        return digest.hexdigest()


@dataclass
class Repo:
    """Commits by id and the branches that point at them."""

    private: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes], message: str, branch: str = "main") -> str:
        """The id of a new commit at the head of `branch`."""
        made = Commit(dict(files), message, self.branches.get(branch))
        self.commits[made.oid] = made
        self.branches[branch] = made.oid
        return made.oid

    def resolve(self, revision: str) -> str | None:
        """The commit's id of a branch or an id; `None` if there is none."""
        oid = self.branches.get(revision, revision)
        return oid if oid in self.commits else None

    def head(self, branch: str = "main") -> Commit:
        """What a branch holds."""
        return self.commits[self.branches[branch]]


@dataclass(frozen=True)
class User:
    """Who a token belongs to, and the namespaces that it may write."""

    name: str
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """What was asked and answered; `sent` counts the bytes of the body."""

    method: str
    path: str
    status: int
    sent: int
    range: str | None
    token: str | None


@contextmanager
def client_of(url: str, home: Path, token: str | None = None) -> Iterator[None]:
    """Makes this process a client of the hub at `url` in the body, with its cache and its token at `home`.

    What asks the Hub through transformers needs a process of its own: transformers keeps a client.
    """
    from huggingface_hub import constants, file_download, utils

    reset_sessions = getattr(utils, "reset_sessions", lambda: None)  # before 1.0 a session stays offline, or online
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # large files by LFS: the server does not speak Xet
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
        for module in (constants, file_download):  # before 1.0 the second one has a copy
            patch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        patch.setattr(constants, "ENDPOINT", url)
        patch.setenv("HF_TOKEN", token or "")
        reset_sessions()
        yield
    reset_sessions()


class Hub:
    """The server, from `with` to the end of its block, on a free port of loopback.

    Args:
        users: By token.
    """

    def __init__(self, users: Mapping[str, User] | None = None) -> None:
        self.users = dict(users or {})
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.uploads: dict[str, bytes] = {}  # by sha256
        self._cuts: dict[str, int] = {}
        hub = self

        class Handler(_Handler):
            """Answers for this hub."""

            def __init__(self, *args: Any) -> None:
                self.hub = hub
                super().__init__(*args)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # Large files lie on another host, as far as a client can tell: it asks the first one for their metadata.
        self.storage = f"http://localhost:{self._server.server_port}"

    def __enter__(self) -> Hub:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(self, name: str, folder: Path | Mapping[str, bytes], message: str = "Upload", branch: str = "main") -> str:
        """The id of a commit that holds exactly the files of `folder`; the repository is made if there is none."""
        if isinstance(folder, Path):
            paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
            folder = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        return self.repos.setdefault(name, Repo()).commit(folder, message, branch)

    def cut(self, path: str, after: int) -> None:
        """Breaks the connection once, `after` so many bytes of the next body whose file is called `path`."""
        self._cuts[path] = after

    def bodies(self, since: int = 0) -> list[Request]:
        """Answers that carried a file's content, redirects not among them."""
        files = re.compile(r"/cdn/|/[^/]+/[^/]+/resolve/")
        return [
            request
            for request in self.requests[since:]
            if request.method == "GET" and request.status in (200, 206) and files.match(request.path)
        ]

    def marked(self, mark: str) -> int:
        """How many requests had come when a process asked for `/mark/<mark>`, by which it says how far it is."""
        return next(n for n, request in enumerate(self.requests) if request.path == f"/mark/{mark}")


def git_oid(data: bytes) -> str:
    """What git calls a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(data: bytes) -> str:
    """What LFS calls it."""
    return hashlib.sha256(data).hexdigest()


def is_lfs(path: str) -> bool:
    """Whether the Hub keeps this file out of git."""
    return path.endswith(LFS_SUFFIXES)


def file_oid(path: str, data: bytes) -> str:
    """The ETag of a file, which is also its name in the client's cache."""
    return sha256(data) if is_lfs(path) else git_oid(data)


def entry(path: str, data: bytes) -> dict[str, Any]:
    """A file in a tree listing."""
    lfs = {"lfs": {"oid": sha256(data), "size": len(data), "pointerSize": 130}} if is_lfs(path) else {}
    return {"type": "file", "path": path, "size": len(data), "oid": git_oid(data), **lfs}


class Refusal(Exception):
    """An answer that is an error, in the Hub's headers."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


MODEL = r"(?P<repo>[^/]+/[^/]+)"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    # What is answered where; the first match is called with the named groups.
    ROUTES = [
        ("GET", rf"/api/models/{MODEL}", "info"),
        ("GET", rf"/api/models/{MODEL}/revision/(?P<revision>.+)", "info"),
        ("GET", rf"/api/models/{MODEL}/refs", "refs"),
        ("GET", rf"/api/models/{MODEL}/commits/(?P<revision>[^/]+)", "commits"),
        ("GET", rf"/api/models/{MODEL}/tree/(?P<revision>[^/]+)(?:/(?P<below>.+))?", "tree"),
        ("POST", rf"/api/models/{MODEL}/paths-info/(?P<revision>[^/]+)", "paths_info"),
        ("GET", rf"/{MODEL}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "file"),
        ("GET", r"/cdn/(?P<oid>[0-9a-f]{64})/(?P<path>.+)", "stored"),
        ("GET", r"/mark/(?P<mark>.+)", "marked"),
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", rf"/api/models/{MODEL}/branch/(?P<branch>.+)", "branch"),
        ("POST", rf"/api/models/{MODEL}/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", rf"/{MODEL}\.git/info/lfs/objects/batch", "lfs_batch"),
        ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "lfs_put"),
        ("POST", rf"/api/models/{MODEL}/commit/(?P<revision>[^/]+)", "commit"),
    ]

    def answer(self) -> None:
        """Reads the whole request, finds its route, and answers; a refusal is an answer too."""
        parts = urlparse(self.path)
        self.query = parse_qs(parts.query)
        self.payload = self._body()
        method = "GET" if self.command == "HEAD" else self.command
        try:
            for asked, pattern, name in self.ROUTES:
                # Names are matched as they were sent: a branch with a slash comes as %2F.
                match = re.fullmatch(pattern, parts.path)
                if asked == method and match:
                    groups = {key: unquote(value) for key, value in match.groupdict().items() if value}
                    getattr(self, name)(**groups)
                    return
            raise Refusal(404, "Not found")
        except Refusal as refusal:
            code = {"X-Error-Code": refusal.code} if refusal.code else {}
            body = json.dumps({"error": refusal.message}).encode()
            self.send(
                refusal.status,
                body,
                {"Content-Type": "application/json", "X-Error-Message": refusal.message, **code},
            )

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: `Hub.requests` remembers."""

    def send(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None, name: str = "") -> None:
        """Answers and remembers; a planned cut of the file `name` ends the connection within the body."""
        cut = self.hub._cuts.pop(name, None) if self.command == "GET" and status in (200, 206) else None
        sent = b"" if self.command == "HEAD" else body[:cut]
        self.hub.requests.append(
            Request(self.command, unquote(self.path), status, len(sent), self.headers.get("Range"), self._token())
        )
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(sent)
        if cut is not None:
            self.close_connection = True

    def json(self, value: Any, status: int = 200) -> None:
        """Answers with JSON."""
        self.send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", "").lower():
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return b"".join(self._chunks())

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    # Who asks.

    def _token(self) -> str | None:
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        return token if kind == "Bearer" else None

    def user(self) -> User | None:
        """The token's owner, or nobody; a token that nobody owns is refused."""
        token = self._token()
        if token is not None and token not in self.hub.users:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return self.hub.users.get(token) if token is not None else None

    def readable(self, name: str) -> Repo:
        """A repository; a private one does not exist for who may not read it."""
        user, repo = self.user(), self.hub.repos.get(name)
        if repo is None or (repo.private and (user is None or name.split("/")[0] not in user.writes)):
            raise Refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        return repo

    def writable(self, name: str) -> Repo:
        """A repository, for who may write it."""
        repo = self.readable(name)
        self.may_write(name.split("/")[0])
        return repo

    def may_write(self, namespace: str) -> User:
        """The user; nobody gets a 401, and somebody else a 403, as on the Hub."""
        user = self.user()
        if user is None:
            raise Refusal(401, "Invalid username or password.")
        if namespace not in user.writes:
            raise Refusal(403, f'You don\'t have the rights to create a model under the namespace "{namespace}".')
        return user

    # Reading.

    def snapshot(self, name: str, revision: str) -> tuple[str, Commit]:
        """A commit and its id."""
        repo = self.readable(name)
        oid = repo.resolve(revision)
        if oid is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid, repo.commits[oid]

    def info(self, repo: str, revision: str = "main") -> None:
        known = self.readable(repo)
        oid = known.resolve(revision)
        if oid is None and revision != "main":
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        files = known.commits[oid].files if oid else {}
        common = {"_id": "0", "id": repo, "modelId": repo, "author": repo.split("/")[0], "private": known.private}
        siblings = [{"rfilename": path} for path in sorted(files)]
        self.json(
            {
                **common, "sha": oid, "disabled": False, "gated": False, "tags": [], "downloads": 0, "likes": 0,
                "lastModified": DAY, "createdAt": DAY, "siblings": siblings,
            }
        )  # fmt: skip

    def refs(self, repo: str) -> None:
        branches = self.readable(repo).branches.items()
        listed = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid} for name, oid in branches]
        self.json({"branches": listed, "converts": [], "tags": []})

    def commits(self, repo: str, revision: str) -> None:
        known, oid, listed = self.readable(repo), self.snapshot(repo, revision)[0], []
        while oid:
            commit = known.commits[oid]
            listed.append({"id": oid, "title": commit.message, "message": "", "authors": [], "date": DAY})
            oid = commit.parent or ""
        self.json(listed)

    def tree(self, repo: str, revision: str, below: str = "") -> None:
        files = self.snapshot(repo, revision)[1].files
        prefix = f"{below}/" if below else ""
        inside = {path: data for path, data in sorted(files.items()) if path.startswith(prefix)}
        if below and not inside:
            raise Refusal(404, f"{below} does not exist on {revision}", "EntryNotFound")
        if self.query.get("recursive", ["false"])[0].lower() == "true":
            self.json([entry(path, data) for path, data in inside.items()])
            return
        shallow = {path: data for path, data in inside.items() if "/" not in path.removeprefix(prefix)}
        folders = {prefix + path.removeprefix(prefix).split("/")[0] for path in inside.keys() - shallow.keys()}
        listed = [{"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in sorted(folders)]
        self.json(listed + [entry(path, data) for path, data in shallow.items()])

    def paths_info(self, repo: str, revision: str) -> None:
        files = self.snapshot(repo, revision)[1].files
        asked = json.loads(self.payload)["paths"] if self.payload.startswith(b"{") else []
        asked = asked or parse_qs(self.payload.decode()).get("paths", [])
        self.json([entry(path, files[path]) for path in asked if path in files])

    def file(self, repo: str, revision: str, path: str) -> None:
        """A file of git is sent; one of LFS lies elsewhere, and the client is told where and what it is called."""
        oid, commit = self.snapshot(repo, revision)
        if path not in commit.files:
            body = b"Entry not found"
            self.send(404, body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": oid})
            return
        data = commit.files[path]
        headers = {"X-Repo-Commit": oid, "Accept-Ranges": "bytes"}
        if not is_lfs(path):
            self.content(path, data, {**headers, "ETag": f'"{git_oid(data)}"'})
            return
        self.hub.uploads[sha256(data)] = data
        linked = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{sha256(data)}"'}
        self.send(302, b"", {**headers, **linked, "Location": f"{self.hub.storage}/cdn/{sha256(data)}/{path}"})

    def stored(self, oid: str, path: str) -> None:
        if oid not in self.hub.uploads:
            raise Refusal(404, "No such object")
        self.content(path, self.hub.uploads[oid], {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})

    def marked(self, mark: str) -> None:
        self.send(200)

    def content(self, path: str, data: bytes, headers: Mapping[str, str]) -> None:
        """The bytes, or the range of them that is asked for."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self.send(200, data, headers, path)
            return
        first, last = int(asked[1]), int(asked[2] or len(data) - 1)
        if first >= len(data):
            self.send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        where = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        self.send(206, data[first : last + 1], {**headers, **where}, path)

    # Writing.

    def whoami(self) -> None:
        user = self.user()
        if user is None:
            raise Refusal(401, "Invalid username or password.")
        orgs = [{"type": "org", "name": name} for name in user.writes if name != user.name]
        self.json({"type": "user", "name": user.name, "orgs": orgs, "auth": {"type": "access_token"}})

    def validate_yaml(self) -> None:
        """The card's front matter must be closed: the one thing that the tests get wrong on purpose."""
        text = json.loads(self.payload)["content"]
        if text.startswith("---\n") and "\n---" not in text[3:]:
            self.json({"errors": [{"message": "the front matter is not closed"}], "warnings": []}, 400)
            return
        self.json({"errors": [], "warnings": []})

    def create(self) -> None:
        asked = json.loads(self.payload)
        namespace = asked.get("organization") or getattr(self.user(), "name", "")
        self.may_write(namespace)
        name = f"{namespace}/{asked['name']}"
        if name in self.hub.repos:
            self.json({"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}, 409)
            return
        # The older client says private, the newer one visibility.
        repo = Repo(private=bool(asked.get("private")) or asked.get("visibility") == "private")
        repo.commit({".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}, "initial commit")
        self.hub.repos[name] = repo
        self.json({"url": f"{self.hub.url}/{name}", "name": name, "id": "0"})

    def branch(self, repo: str, branch: str) -> None:
        known = self.writable(repo)
        if branch in known.branches:
            raise Refusal(409, f"Reference already exists: {branch}")
        start = json.loads(self.payload or b"{}").get("startingPoint", "main")
        known.branches[branch] = self.snapshot(repo, start)[0]
        self.json({}, 201)

    def preupload(self, repo: str, revision: str) -> None:
        """How each file travels, and what is there already, so that a client sends only what changed."""
        self.writable(repo)
        files = self.snapshot(repo, revision)[1].files
        answers = []
        for asked in json.loads(self.payload)["files"]:
            path = asked["path"]
            mode = "lfs" if is_lfs(path) else "regular"
            there = file_oid(path, files[path]) if path in files else None
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": there})
        self.json({"files": answers})

    def lfs_batch(self, repo: str) -> None:
        self.writable(repo)
        objects = []
        for asked in json.loads(self.payload)["objects"]:
            there = asked["oid"] in self.hub.uploads
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{asked['oid']}", "header": {}}}
            objects.append({"oid": asked["oid"], "size": asked["size"]} | ({} if there else {"actions": upload}))
        self.json({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid: str) -> None:
        if sha256(self.payload) != oid:
            raise Refusal(400, "The content is not what its name says")
        self.hub.uploads[oid] = self.payload
        self.send(200)

    def commit(self, repo: str, revision: str) -> None:
        """All operations or none."""
        known = self.writable(repo)
        if revision not in known.branches:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        files = dict(known.head(revision).files)
        message = ""
        for line in self.payload.splitlines():
            step = json.loads(line)
            key, value = step["key"], step["value"]
            if key == "header":
                message = value["summary"]
                if value.get("parentCommit") not in (None, known.branches[revision]):
                    raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.hub.uploads:
                    raise Refusal(400, f"{value['path']} was not uploaded")
                files[value["path"]] = self.hub.uploads[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
            elif key == "deletedFolder":
                inside = value["path"].rstrip("/") + "/"
                files = {path: data for path, data in files.items() if not path.startswith(inside)}
            else:
                raise Refusal(400, f"Unknown operation {key}")
        oid = known.commit(files, message, revision)
        url = f"{self.hub.url}/{repo}/commit/{oid}"
        self.json({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": "", "pullRequestUrl": None})

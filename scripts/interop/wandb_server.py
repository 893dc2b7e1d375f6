"""A W&B server as far as `wandb sync` needs one: it listens on 127.0.0.1, keeps what is sent, and knows no other host.

`with Server() as server:` sets `server.url`; afterwards `server.run` holds the variables of the run mutations, `server.files` the
lines of every streamed file by line number, `server.uploads` the uploaded files, `server.exit` the exit code.
"""
import gzip
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    def __enter__(self):
        self.run, self.files, self.uploads, self.exit, self.unknown = {}, {}, {}, None, []
        self.http = Listener(("127.0.0.1", 0), type("Handler", (Handler,), {"server_state": self}))
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()

    def graphql(self, query, variables):
        if "upsertBucket" in query:
            self.run.update({key: value for key, value in variables.items() if value is not None})
            entity = {"id": "e", "name": variables.get("entity") or "team"}
            project = {"id": "p", "name": variables["project"], "entity": entity}
            bucket = {"id": "b", "name": variables["name"], "displayName": self.run.get("displayName"), "description": None,
                      "config": "{}", "sweepName": None, "project": project, "historyLineCount": 0}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        if "viewer" in query:
            teams = {"edges": [{"node": {"name": "team"}}]}
            return {"viewer": {"id": "v", "entity": "team", "username": "someone", "email": None, "admin": False, "flags": "{}",
                               "teams": teams}}
        if "serverInfo" in query:
            versions = {"max_cli_version": "9.9.9", "min_cli_version": "0.0.1"}
            return {"serverInfo": {"features": [], "cliVersionInfo": versions, "latestLocalVersionInfo": None}}
        if "__type" in query or "__schema" in query:  # what the server can do: nothing beyond the above
            return {"__type": None, "QueryType": {"fields": []}, "MutationType": {"fields": []}}
        if "model" in query:  # whether the run is there already
            return {"model": None}
        self.unknown.append(query)
        return {}

    def stream(self, message):
        for name, part in (message.get("files") or {}).items():
            lines = self.files.setdefault(name, {})
            lines.update(enumerate(part["content"], part["offset"]))
        if message.get("complete"):
            self.exit = message["exitcode"]
        return {}


class Listener(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # the program ends without closing its connections
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def body(self):
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

    def reply(self, answer):
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.reply({})

    def do_PUT(self):
        self.server_state.uploads[self.path.removeprefix("/upload/")] = self.body()
        self.reply({})

    def do_POST(self):
        message = json.loads(self.body())
        if self.path.endswith("/file_stream"):
            self.reply(self.server_state.stream(message))
        else:
            self.reply({"data": self.server_state.graphql(message["query"], message.get("variables") or {})})

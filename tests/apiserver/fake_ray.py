"""Ray's jobs API and the driver's progress endpoint over HTTP, for every cluster of a test."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from aiohttp import web

from rljob_api.progress import ProgressReport


class FakeRay:
    """Serves `/{namespace}/{service}/{port}/...`; tests set what the drivers are doing."""

    def __init__(self) -> None:
        self.tokens: dict[str, set[str]] = {}
        self.posts: list[dict[str, Any]] = []
        self.drivers: dict[str, dict[str, Any]] = {}
        self.served: Counter[str] = Counter()
        self.reports: dict[str, ProgressReport] = {}
        self.saves: list[str] = []
        self.save_status = 200
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Begin to serve; the answer is a value for RLJOB_RAY_ACCESS."""
        app = web.Application(middlewares=[self._note_token])
        root = "/{namespace}/{service}/{port}"
        app.router.add_get(root + "/api/jobs/{id}", self._get)
        app.router.add_post(root + "/api/jobs/", self._post)
        app.router.add_get(root + "/api/jobs/{id}/logs", self._logs)
        app.router.add_get(root + "/progress", self._progress)
        app.router.add_post(root + "/control/save", self._save)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/{{namespace}}/{{service}}/{{port}}"

    async def stop(self) -> None:
        """Stop serving."""
        if self._runner is not None:
            await self._runner.cleanup()

    def end(self, submission: str, status: str, code: int, message: str = "") -> None:
        """Let a driver end."""
        self.drivers[submission] = {"status": status, "driver_exit_code": code, "message": message}

    @web.middleware
    async def _note_token(self, request: web.Request, handler: Any) -> web.StreamResponse:
        cluster = request.match_info["service"].removesuffix("-head-svc")
        self.tokens.setdefault(cluster, set()).add(request.headers.get("Authorization", ""))
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _get(self, request: web.Request) -> web.Response:
        submission = request.match_info["id"]
        if submission not in self.drivers:
            return web.Response(status=404, text=f"Job {submission} does not exist")
        return web.json_response({"submission_id": submission, **self.drivers[submission]})

    async def _post(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.posts.append(body)
        if body["submission_id"] in self.drivers:
            return web.Response(status=500, text=f"ValueError: Job with submission_id {body['submission_id']} already exists.")
        self.drivers[body["submission_id"]] = {"status": "RUNNING", "driver_exit_code": None, "message": ""}
        return web.json_response({"submission_id": body["submission_id"]})

    async def _logs(self, request: web.Request) -> web.Response:
        return web.json_response({"logs": "no report here"})

    async def _save(self, request: web.Request) -> web.Response:
        self.saves.append(request.query.get("wait", ""))
        return web.json_response({"accepted": True, "step": 5}, status=self.save_status)

    async def _progress(self, request: web.Request) -> web.Response:
        cluster = request.match_info["service"].removesuffix("-head-svc")
        report = self.reports.get(cluster)
        if report is None:
            return web.Response(status=503, text="not up")
        self.served[cluster] += 1
        return web.Response(text=json.dumps(report.to_wire()), content_type="application/json")

"""A way to the API server that hides KubeRay until told: for an operator that is older than KubeRay in a cluster."""

from __future__ import annotations

import contextlib
import ssl

import aiohttp
from aiohttp import web

from rljob_operator.kube import Connection


class Gate:
    """Forwards every request, watches included, with the tester's own credentials; `/apis/ray.io` is 404 while closed."""

    def __init__(self, connection: Connection) -> None:
        self.open = False
        self._connection = connection
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Begin to forward; the answer is the address."""
        context = ssl.create_default_context(cafile=self._connection.ca_path)
        if self._connection.certificate_path:
            context.load_cert_chain(self._connection.certificate_path, self._connection.key_path)
        headers = {"Authorization": f"Bearer {self._connection.token}"} if self._connection.token else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context, limit=0), headers=headers, timeout=aiohttp.ClientTimeout(total=None)
        )
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Stop forwarding."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if not self.open and request.path.startswith("/apis/ray.io"):
            return web.json_response(
                {"kind": "Status", "reason": "NotFound", "message": "no such API", "code": 404}, status=404
            )
        assert self._session is not None
        wanted = {name: request.headers[name] for name in ("Accept", "Content-Type") if name in request.headers}
        url = self._connection.server + str(request.rel_url)
        async with self._session.request(request.method, url, data=await request.read() or None, headers=wanted) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
            with contextlib.suppress(ConnectionResetError):  # the operator was killed: nobody reads on
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
            return response

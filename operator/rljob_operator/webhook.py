"""The admission webhook: `python -m rljob_operator.webhook`. A small HTTPS server that keeps no state; several may run.

Only POST /validate is answered with a verdict; every other path is 404, which the API server takes as a failure, never as
"allowed". The certificate's files are looked at in each TLS handshake, so a new certificate needs no restart.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import ssl
import sys
from pathlib import Path

from aiohttp import web

from .webhook_review import ReviewError, review

log = logging.getLogger("rljob.webhook")

PATH = "/validate"
MAX_BODY = 16 * 2**20
"""An AdmissionReview holds the object before and after; etcd takes 1.5 MiB, the API server 3 MiB."""

_HELP = f"""Answers AdmissionReviews for RLJobs at {PATH}, over HTTPS. Environment variables:

  RLJOB_WEBHOOK_PORT          port (default 9443)
  RLJOB_WEBHOOK_CERTIFICATES  directory with tls.crt and tls.key (default /etc/rljob/webhook)
  RLJOB_LOG_LEVEL             DEBUG, INFO, WARNING or ERROR (default INFO)
"""


class CertificateError(Exception):
    """The certificate can't be used; the message names the files."""


class Certificates:
    """The TLS context of two files, read anew when they change."""

    def __init__(self, directory: Path) -> None:
        self._files = (directory / "tls.crt", directory / "tls.key")
        self._stamp: tuple[int, ...] = ()
        self._context = self._load()
        self.listening = self._load()
        # Called in every handshake, whether or not the client names a server.
        self.listening.sni_callback = self._pick

    def _pick(self, connection: ssl.SSLObject, _name: str, _context: ssl.SSLContext) -> None:
        try:
            if self._stat() != self._stamp:
                self._context = self._load()
                log.info("read a new certificate from %s", self._files[0])
        except CertificateError as error:
            # A mount that is being exchanged, or a pair that does not belong together: the next handshake tries again.
            log.warning("%s; going on with the certificate from before", error)
        connection.context = self._context

    def _stat(self) -> tuple[int, ...]:
        try:
            found = [file.stat() for file in self._files]
        except OSError as error:
            raise CertificateError(f"{error.filename}: {error.strerror}") from None
        return tuple(number for one in found for number in (one.st_mtime_ns, one.st_ino, one.st_size))

    def _load(self) -> ssl.SSLContext:
        stamp = self._stat()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(*self._files)
        except (ssl.SSLError, OSError) as error:
            raise CertificateError(f"{self._files[0]} and {self._files[1]}: {error}") from None
        self._stamp = stamp
        return context


async def validate(request: web.Request) -> web.Response:
    """One AdmissionReview."""
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError):
        return web.Response(status=400, text="the body is not JSON")
    try:
        answer = review(body)
    except ReviewError as error:
        return web.Response(status=400, text=str(error))
    if not answer["response"]["allowed"]:
        where = body["request"].get("namespace"), body["request"].get("name")
        log.info("refused %r: %s", where, answer["response"]["status"]["message"])
    return web.json_response(answer)


async def _healthy(_: web.Request) -> web.Response:
    return web.Response(text="ok")


def application() -> web.Application:
    """The server's routes."""
    app = web.Application(client_max_size=MAX_BODY)
    app.router.add_post(PATH, validate)
    app.router.add_get("/healthz", _healthy)
    return app


def main(arguments: list[str] | None = None) -> int:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(
        prog="python -m rljob_operator.webhook", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    level, port = os.environ.get("RLJOB_LOG_LEVEL") or "INFO", os.environ.get("RLJOB_WEBHOOK_PORT") or "9443"
    directory = Path(os.environ.get("RLJOB_WEBHOOK_CERTIFICATES") or "/etc/rljob/webhook")
    if level not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
        return _end(f"RLJOB_LOG_LEVEL={level}: expected DEBUG, INFO, WARNING or ERROR")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return _end(f"RLJOB_WEBHOOK_PORT={port}: expected a port from 1 to 65535")
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z")
    try:
        certificates = Certificates(directory)
    except CertificateError as error:
        return _end(f"{error}; RLJOB_WEBHOOK_CERTIFICATES names the directory")
    log.info("answering at port %s%s with the certificate in %s", port, PATH, directory)
    try:
        web.run_app(
            application(),
            port=int(port),
            ssl_context=certificates.listening,
            access_log=None,
            print=None,
            shutdown_timeout=5,
        )
    except OSError as error:
        return _end(f"cannot listen on port {port}: {error.strerror or error}")
    return 0


def _end(problem: str) -> int:
    print(f"rljob-webhook: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

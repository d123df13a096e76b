"""An API server of Kubernetes on loopback that plays watches: over TLS, in chunks, with a token to be shown.

There is none here that is real. The events are of the shape that a real one sends, as far as anything reads them.
"""

from __future__ import annotations

import json
import queue
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

HOST = "127.0.0.1"
NAMESPACE = "training"
TOKEN = "eyJhbGciOiJSUzI1NiJ9.of-a-service-account.signed"
DELETED_AT = "2026-03-02T10:00:05Z"


def pod(
    name: str, *, uid: str = "", version: int = 1, deleted: bool = False, status: Mapping[str, object] | None = None
) -> dict[str, object]:
    """A pod, as a watch shows it."""
    metadata = {
        "name": name,
        "namespace": NAMESPACE,
        "uid": uid or f"uid-of-{name}",
        "resourceVersion": str(version),
        "labels": {"app": "oobleck", "role": "node", "apps.kubernetes.io/pod-index": name.rpartition("-")[2]},
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "oobleck-node", "uid": "u"}],
        **({"deletionTimestamp": DELETED_AT, "deletionGracePeriodSeconds": 120} if deleted else {}),
    }
    running = {"phase": "Running", "podIP": "10.0.0.7", "conditions": [{"type": "Ready", "status": "True"}]}
    spec = {"nodeName": "machine-3", "containers": [{"name": "node", "image": "oobleck"}]}
    return {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": spec, "status": status or running}


def event(kind: str, thing: object) -> bytes:
    return json.dumps({"type": kind, "object": thing}).encode() + b"\n"


def bookmark(version: int) -> bytes:
    metadata = {"resourceVersion": str(version), "creationTimestamp": None}
    return event("BOOKMARK", {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": {}, "status": {}})


def failure(code: int, reason: str, message: str) -> dict[str, object]:
    """What the server says where it cannot do what was asked."""
    about = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return {**about, "message": message, "reason": reason, "code": code}


def gone(version: int) -> bytes:
    return event("ERROR", failure(410, "Expired", f"too old resource version: {version} (90)"))


@dataclass(frozen=True)
class Answer:
    """To one request: what is sent, piece by piece, before the connection is closed."""

    pieces: Sequence[bytes] = ()
    status: int = 200
    is_cut: bool = False
    """In the middle of a chunk."""


@dataclass
class FakeAPI:
    """A server under way. It gives `answers` first, and then sends what is put into `live`, until None is."""

    port: int
    account: Path
    answers: list[Answer] = field(default_factory=list)
    live: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    asked: list[dict[str, str]] = field(default_factory=list)
    """The queries of all requests that showed the token."""

    @property
    def environment(self) -> dict[str, str]:
        """What a pod of it finds."""
        return {
            "KUBERNETES_SERVICE_HOST": HOST,
            "KUBERNETES_SERVICE_PORT": str(self.port),
            "OOBLECK_SERVICE_ACCOUNT": str(self.account),
        }


@contextmanager
def serve_kubernetes_api(directory: Path) -> Iterator[FakeAPI]:
    """Serve until the context ends."""
    directory.mkdir()
    _make_certificate(directory)
    (directory / "token").write_text(TOKEN)
    (directory / "namespace").write_text(NAMESPACE)
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer((HOST, 0), handler)
    server.handle_error = lambda request, address: None  # type: ignore[method-assign]  # clients that do not trust it
    server.daemon_threads = True
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(directory / "ca.crt", directory / "tls.key")
    server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    api = handler.api = FakeAPI(server.server_address[1], directory)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    try:
        yield api
    finally:
        server.shutdown()
        api.live.put(None)
        server.server_close()
        serving.join()


class _Handler(BaseHTTPRequestHandler):
    api: FakeAPI
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        where = urlsplit(self.path)
        if self.headers["Authorization"].split() not in (["bearer", TOKEN], ["Bearer", TOKEN]):
            self._answer(Answer([json.dumps(failure(401, "Unauthorized", "Unauthorized")).encode()], status=401))
        elif where.path != f"/api/v1/namespaces/{NAMESPACE}/pods":
            self._answer(Answer([json.dumps(failure(404, "NotFound", "not found")).encode()], status=404))
        else:
            self.api.asked.append({name: values[0] for name, values in parse_qs(where.query).items()})
            self._answer(self.api.answers.pop(0) if self.api.answers else None)

    def _answer(self, answer: Answer | None) -> None:
        self.close_connection = True
        self.send_response(200 if answer is None else answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for piece in iter(self.api.live.get, None) if answer is None else answer.pieces:
                self._send_chunk(piece)
            if answer is not None and answer.is_cut:
                self.wfile.write(b'1000\r\n{"type":')
            else:
                self._send_chunk(b"")
        except OSError:
            pass  # the client has gone

    def _send_chunk(self, piece: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.flush()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


def _make_certificate(directory: Path) -> None:
    """One that is its own authority, for our address."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kube-apiserver")])
    now = datetime.now(UTC)
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign"), False
    )
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(HOST))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=True, key_cert_sign=True, encipher_only=False, decipher_only=False, **usage
            ),
            critical=True,
        )
        .sign(key, hashes.SHA256())
    )
    (directory / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (directory / "tls.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )

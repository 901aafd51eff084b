"""Who may do what over the wire: mutual TLS for the connection, a bearer token per role for the calls.

One folder holds what one host needs, under fixed names (`python -m launchers.certs` writes them):

    ca.crt                     the site's own certificate authority, on every host
    ROLE.crt, ROLE.key         this host's certificate and private key; ROLE is gateway, learner, actor or reader
    ROLE.token                 the role's bearer token, on the hosts of that role
    tokens.json                SHA-256 of every role's token, on the gateway only

Without a folder a connection is in the clear, and then only to and from the loopback, unless the user says
otherwise. A handshake that fails is looked at once more with Python's own TLS, since gRPC tells little of why.
"""

import dataclasses
import hashlib
import hmac
import ipaddress
import json
import socket
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc

from longhaul.errors import ConfigError

ROLES = ("learner", "actor", "reader")
_AUTHORIZATION = "authorization"
_EXPLAIN_TIMEOUT_S = 5.0
_CERTIFICATE_REFUSED = "the other end refuses this end's certificate (its log says why)"
# What a role may call, and no more.
_ALLOWED = {
    "learner": {"Describe", "Sample", "PublishWeights", "Checkpoint", "Health"},
    "actor": {"Describe", "Insert", "WatchWeights", "Health"},
    "reader": {"Describe", "WatchWeights", "Health"},
}


@dataclasses.dataclass(frozen=True)
class Credentials:
    """One host's part of the folder, as read.

    Attributes:
      ca: PEM of the authority that the other end must have its certificate from.
      certificate: PEM of this host's.
      key: PEM of its private key.
      token: sent with each call; empty at the gateway.
      token_hashes: role -> hex SHA-256 of its token; at the gateway only.
    """

    ca: bytes
    certificate: bytes
    key: bytes
    token: str = ""
    token_hashes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def for_channel(self) -> grpc.ChannelCredentials:
        """Returns gRPC's form for a client."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)

    def for_server(self) -> grpc.ServerCredentials:
        """Returns gRPC's form for a server that asks every client for a certificate."""
        return grpc.ssl_server_credentials([(self.key, self.certificate)], self.ca, require_client_auth=True)


def load(folder: str | Path, role: str) -> Credentials:
    """Reads a host's credentials.

    Args:
      folder: see the module's text.
      role: "gateway" or one of ROLES.

    Raises:
      ConfigError: a file is missing or damaged, named, with the mend.
    """
    base = Path(folder)

    def read(name: str) -> bytes:
        try:
            return (base / name).read_bytes()
        except OSError as error:
            text = (
                f"--credentials: {base / name} can't be read ({error.strerror}); `python -m launchers.certs` makes it"
            )
            raise ConfigError(text) from None

    hashes: dict[str, str] = {}
    token = ""
    if role == "gateway":
        try:
            hashes = {str(name): str(value) for name, value in json.loads(read("tokens.json")).items()}
        except (ValueError, AttributeError):
            raise ConfigError(f"--credentials: {base / 'tokens.json'} is damaged; make it again") from None
    else:
        token = read(f"{role}.token").decode().strip()
    return Credentials(read("ca.crt"), read(f"{role}.crt"), read(f"{role}.key"), token, hashes)


def token_hash(token: str) -> str:
    """Returns what the gateway keeps of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address is this machine's own loopback."""
    name = host.strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def check_plaintext(host: str, credentials: Credentials | None, insecure: bool, flag: str) -> None:
    """Refuses to speak in the clear beyond the loopback.

    Raises:
      ConfigError: naming the flag that holds the host, and both mends.
    """
    if credentials is None and not insecure and not is_loopback(host):
        raise ConfigError(
            f"{flag} is {host}, beyond the loopback, and there is no TLS: give --credentials=DIR "
            "(`python -m launchers.certs` makes it), or --insecure to send everything in the clear"
        )


class SendToken(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds the bearer token to every call."""

    def __init__(self, token: str):
        self._header = (_AUTHORIZATION, f"Bearer {token}")

    def _send(self, call: Callable[..., Any], details: Any, request: Any) -> Any:
        changed = grpc.ClientCallDetails()
        for name in ("method", "timeout", "credentials", "wait_for_ready", "compression"):
            setattr(changed, name, getattr(details, name, None))
        changed.metadata = [*(details.metadata or []), self._header]
        return call(changed, request)

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return self._send(continuation, client_call_details, request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return self._send(continuation, client_call_details, request)

    def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return self._send(continuation, client_call_details, request_iterator)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return self._send(continuation, client_call_details, request_iterator)


class CheckToken(grpc.ServerInterceptor):
    """Lets a call pass only with a token of a role that may make it.

    Args:
      token_hashes: role -> hex SHA-256.
      refused: told of each refusal in one line.
    """

    def __init__(self, token_hashes: Mapping[str, str], refused: Callable[[str], None]):
        self._hashes = dict(token_hashes)
        self._refused = refused

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        method = handler_call_details.method.rsplit("/", 1)[-1]
        role = self.role_of(handler_call_details.invocation_metadata)
        if role is None:
            given = dict(handler_call_details.invocation_metadata).get(_AUTHORIZATION)
            why = "no bearer token was sent" if not given else "the bearer token is not one of this gateway's"
            return self._deny(continuation(handler_call_details), grpc.StatusCode.UNAUTHENTICATED, f"{method}: {why}")
        if method not in _ALLOWED.get(role, set()):
            text = f"{method}: the token's role {role!r} may not call it"
            return self._deny(continuation(handler_call_details), grpc.StatusCode.PERMISSION_DENIED, text)
        return continuation(handler_call_details)

    def role_of(self, metadata: Any) -> str | None:
        """Returns the role whose token a call's metadata carries, None without a known one."""
        given = dict(metadata).get(_AUTHORIZATION, "")
        sent, found = token_hash(given.removeprefix("Bearer ")), None
        for role, expected in self._hashes.items():
            if hmac.compare_digest(sent, expected):  # every role is looked at: time tells nothing
                found = role
        return found

    def _deny(self, handler: Any, code: grpc.StatusCode, text: str) -> Any:
        self._refused(text)

        def abort(_: Any, context: grpc.ServicerContext) -> Any:
            context.abort(code, text)

        if handler is None:
            return None
        if handler.request_streaming:
            make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else None
            make = make or grpc.stream_unary_rpc_method_handler
        else:
            make = grpc.unary_stream_rpc_method_handler if handler.response_streaming else None
            make = make or grpc.unary_unary_rpc_method_handler
        return make(abort, handler.request_deserializer, handler.response_serializer)


def explain_failure(address: str, credentials: Credentials | None) -> str | None:
    """Says why a connection can't come to be, if the reason is one that waiting does not mend.

    Returns:
      One line, or None if the address does not answer or nothing is wrong with the handshake.
    """
    host, port = address.rsplit(":", 1)
    try:
        raw = socket.create_connection((host.strip("[]"), int(port)), timeout=_EXPLAIN_TIMEOUT_S)
    except (OSError, ValueError):
        return None
    with raw:
        if credentials is None:
            return _explain_plaintext(raw)
        return _explain_tls(raw, host.strip("[]"), credentials)


def _explain_plaintext(raw: socket.socket) -> str | None:
    """A TLS server answers a ClientHello; an HTTP/2 server in the clear does not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(raw):
            pass
    except ssl.SSLError as error:
        if "CERTIFICATE_REQUIRED" not in str(error).upper():
            return None
    except OSError:
        return None
    return "the other end speaks TLS and this end plaintext: give --credentials=DIR"


def _explain_tls(raw: socket.socket, host: str, credentials: Credentials) -> str | None:
    context = ssl.create_default_context(cadata=credentials.ca.decode())
    context.set_alpn_protocols(["h2"])
    try:
        with _files(credentials) as (certificate, key):
            context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        return f"this end's certificate and key do not fit each other: {error.reason}"
    try:
        with context.wrap_socket(raw, server_hostname=host) as secured:
            secured.settimeout(_EXPLAIN_TIMEOUT_S)
            # TLS 1.3: the other end judges our certificate only after our handshake is done, and gRPC then hangs
            # up without a word; content with us, it speaks first (HTTP/2 settings).
            if secured.recv(1):
                return None
        return f"{_CERTIFICATE_REFUSED}: it hangs up after the handshake"
    except (ssl.SSLEOFError, ConnectionResetError):
        return f"{_CERTIFICATE_REFUSED}: it hangs up after the handshake"
    except ssl.SSLCertVerificationError as error:
        return f"the other end's certificate is refused: {error.verify_message}"
    except ssl.SSLError as error:
        reason = str(error.reason or error)
        if "WRONG_VERSION_NUMBER" in reason or "RECORD_LAYER" in reason:
            return "the other end speaks plaintext and this end TLS: give it --credentials=DIR"
        return f"{_CERTIFICATE_REFUSED}: {reason.replace('_', ' ').lower()}"
    except OSError:
        return None


class _files:
    """Certificate and key as files for as long as Python's ssl needs to read them."""

    def __init__(self, credentials: Credentials):
        self._credentials = credentials

    def __enter__(self) -> tuple[str, str]:
        import tempfile

        self._folder = tempfile.TemporaryDirectory(prefix="longhaul-")
        base = Path(self._folder.name)  # readable by this user alone
        (base / "own.crt").write_bytes(self._credentials.certificate)
        (base / "own.key").write_bytes(self._credentials.key)
        return str(base / "own.crt"), str(base / "own.key")

    def __exit__(self, *exc_info: object) -> None:
        self._folder.cleanup()

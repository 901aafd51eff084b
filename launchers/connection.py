"""The flags of a connection: where the gateway is, and with which credentials it is spoken to."""

from absl import flags

from launchers import command_line
from longhaul import security

GATEWAY = flags.DEFINE_string("gateway", "127.0.0.1:7720", "the site's gateway, HOST:PORT")
_CREDENTIALS = flags.DEFINE_string(
    "credentials", None, "folder with this host's certificate and token, made by `python -m launchers.certs`"
)
_INSECURE = flags.DEFINE_bool(
    "insecure", False, "allow a connection beyond the loopback without credentials, in the clear for whoever listens"
)


def to_gateway(role: str) -> tuple[str, security.Credentials | None]:
    """Returns the gateway's address and this peer's credentials for it, None on loopback without --credentials.

    Raises:
      ConfigError: the address can't be read, credentials are missing or damaged, or none are given beyond the loopback.
    """
    host, _ = command_line.parse_address(GATEWAY.value, "gateway")
    return GATEWAY.value, of_host(host, role, "--gateway")


def of_host(host: str, role: str, flag: str) -> security.Credentials | None:
    """Returns this peer's credentials for speaking to, or listening on, a host; see to_gateway.

    Args:
      host: name or address.
      role: "gateway", "learner", "actor" or "reader".
      flag: that gave the host, for the message.

    Raises:
      ConfigError: see to_gateway.
    """
    credentials = security.load(_CREDENTIALS.value, role) if _CREDENTIALS.value else None
    security.check_plaintext(host, credentials, _INSECURE.value, flag)
    return credentials

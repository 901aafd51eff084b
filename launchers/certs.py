"""Makes a site's certificate authority, certificates and tokens in one command.

  python -m launchers.certs --out=certs --gateway_names=buffer.example.org,203.0.113.7

Copy to each host only what it needs: certs/gateway/ to the buffer node, certs/learner/ to the learner, certs/actor/ to
actors on other hosts, certs/reader/ to evaluators. certs/ca.key stays where it is safe: who has it can make
certificates. Run again with the same --out, it renews the certificates and tokens and keeps the authority.
"""

import datetime
import ipaddress
import json
import os
import secrets
from pathlib import Path

from absl import flags
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from launchers import command_line
from longhaul import security, workers
from longhaul.errors import ConfigError

_OUT = flags.DEFINE_string("out", "certs", "folder to write; made if it is not there")
_NAMES = flags.DEFINE_list(
    "gateway_names", ["localhost", "127.0.0.1"], "every host name and address that peers dial the gateway by"
)
_DAYS = flags.DEFINE_integer(
    "days", 397, "how long the certificates are valid; the authority lasts ten times as long", lower_bound=1
)

_Key = ec.EllipticCurvePrivateKey


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _write(path: Path, data: bytes, private: bool = False) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _key_pem(key: _Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _builder(subject: x509.Name, issuer: x509.Name, key: _Key, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def make_authority(days: int) -> tuple[x509.Certificate, _Key]:
    """Returns a new authority: its certificate and key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"longhaul site {secrets.token_hex(4)}")
    builder = _builder(name, name, key, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    builder = builder.add_extension(usage, critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return builder.sign(key, hashes.SHA256()), key


def make_certificate(
    authority: x509.Certificate, authority_key: _Key, role: str, names: list[str], days: int
) -> tuple[bytes, bytes]:
    """Returns certificate and key, as PEM, of one role; the gateway's names are what peers dial."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_name(f"longhaul {role}"), authority.subject, key, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    server = role == "gateway"
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    if server:
        builder = builder.add_extension(x509.SubjectAlternativeName(_alternatives(names)), critical=False)
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = builder.add_extension(issuer_id, critical=False)
    certificate = builder.sign(authority_key, hashes.SHA256())
    return certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key)


def _alternatives(names: list[str]) -> list[x509.GeneralName]:
    found: list[x509.GeneralName] = []
    for name in names:
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            if not name or "/" in name or ":" in name:
                raise ConfigError(f"--gateway_names: {name!r} is neither a host name nor an address") from None
            found.append(x509.DNSName(name))
    return found


def _authority(out: Path, days: int) -> tuple[x509.Certificate, _Key]:
    """Returns the folder's authority, making it first if there is none."""
    if (out / "ca.key").exists():
        key = serialization.load_pem_private_key((out / "ca.key").read_bytes(), password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return x509.load_pem_x509_certificate((out / "ca.crt").read_bytes()), key
    certificate, key = make_authority(10 * days)
    _write(out / "ca.key", _key_pem(key), private=True)
    _write(out / "ca.crt", certificate.public_bytes(serialization.Encoding.PEM))
    return certificate, key


def make_site(out: Path, names: list[str], days: int) -> None:
    """Writes a folder per role, each with what a host of that role needs and no more."""
    out.mkdir(parents=True, exist_ok=True)
    os.chmod(out, 0o700)
    authority, authority_key = _authority(out, days)
    tokens = {role: secrets.token_urlsafe(32) for role in security.ROLES}
    for role in ("gateway", *security.ROLES):
        folder = out / role
        folder.mkdir(exist_ok=True)
        os.chmod(folder, 0o700)
        certificate, key = make_certificate(authority, authority_key, role, names, days)
        _write(folder / "ca.crt", authority.public_bytes(serialization.Encoding.PEM))
        _write(folder / f"{role}.crt", certificate)
        _write(folder / f"{role}.key", key, private=True)
        if role == "gateway":
            hashed = {name: security.token_hash(token) for name, token in tokens.items()}
            _write(folder / "tokens.json", json.dumps(hashed, indent=2).encode(), private=True)
        else:
            _write(folder / f"{role}.token", tokens[role].encode() + b"\n", private=True)


def main(signals: workers.StopSignals) -> None:
    make_site(Path(_OUT.value), _NAMES.value, _DAYS.value)
    names = ", ".join(_NAMES.value)
    print(f"{_OUT.value}: certificates for a gateway dialled as {names}, valid for {_DAYS.value} days.")
    print("Copy the gateway, learner, actor and reader folders to their hosts and give each --credentials=FOLDER.")


if __name__ == "__main__":
    command_line.run_without_config(main)

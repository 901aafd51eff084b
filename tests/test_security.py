"""Over the wire only those get in who should, each refusal says why, and nothing falls back to the clear."""

import dataclasses
import datetime
import socket
import threading

import grpc
import pytest

pytest.importorskip("reverb")
pytest.importorskip("cryptography")

from launchers import certs
from longhaul import channel, security
from longhaul.errors import ConfigError, Refused
from longhaul.gateway import Gateway
from longhaul.link import LinkClient
from longhaul.proto import longhaul_pb2 as pb
from longhaul.proto import longhaul_pb2_grpc as rpc
from longhaul.site_client import SiteClient
from longhaul.types import Snapshot
from tests.site import SPEC, CheckingLearner, Writer, eventually, small_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("certs")
    certs.make_site(out, ["localhost", "127.0.0.1"], days=30)
    return out


@pytest.fixture
def secured(folder):
    gateway = Gateway(small_config(), credentials=security.load(folder / "gateway", "gateway"))
    gateway.start()
    yield gateway
    gateway.stop(0.2)


def _announce(gateway, credentials, role="actor", host="127.0.0.1", spec=SPEC):
    site = SiteClient(f"{host}:{gateway.port}", role, threading.Event(), credentials)
    try:
        return site.announce(spec, timeout_s=10.0)
    finally:
        site.close()


def test_the_whole_loop_runs_over_tls_with_tokens(folder, secured):
    stop = threading.Event()
    site = SiteClient(f"127.0.0.1:{secured.port}", "actor", stop, security.load(folder / "actor", "actor"))
    writer = Writer(site)
    writer.write(50)
    site.start()
    learner = security.load(folder / "learner", "learner")
    link = LinkClient(f"localhost:{secured.port}", small_config(), 1, stop, credentials=learner)
    link.describe(10.0)
    link.open(1000, 8, 1, 1)
    checking = CheckingLearner(link, 1000)
    for _ in range(5):
        checking.step()
    link.publish(Snapshot(1, 1, b"weights"))
    eventually(lambda: site.newest_weights() is not None)
    link.close()
    site.close()
    writer.close()


def test_a_name_that_the_certificate_lacks_is_refused_and_named(folder, tmp_path):
    certs.make_site(tmp_path, ["elsewhere.example"], days=30)
    gateway = Gateway(small_config(), credentials=security.load(tmp_path / "gateway", "gateway"))
    gateway.start()
    with pytest.raises(Refused, match=r"certificate is refused:.*(127\.0\.0\.1|[Mm]ismatch)"):
        _announce(gateway, security.load(tmp_path / "actor", "actor"))
    gateway.stop(0.2)


def test_an_unknown_authority_is_refused_and_named(folder, secured, tmp_path):
    certs.make_site(tmp_path, ["127.0.0.1"], days=30)
    with pytest.raises(Refused, match=r"certificate is refused:.*(issuer|self.signed|signature)"):
        _announce(secured, security.load(tmp_path / "actor", "actor"))


def test_a_client_of_an_unknown_authority_is_told_so(folder, secured, tmp_path):
    certs.make_site(tmp_path, ["127.0.0.1"], days=30)
    stranger = security.load(tmp_path / "actor", "actor")
    mixed = dataclasses.replace(stranger, ca=security.load(folder / "actor", "actor").ca)
    with pytest.raises(Refused, match=r"refuses this end's certificate"):
        _announce(secured, mixed)


def test_an_expired_certificate_is_refused_and_named(folder, tmp_path, monkeypatch):
    class Past(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) - datetime.timedelta(days=60)

    certs.make_site(tmp_path, ["127.0.0.1"], days=30)
    with monkeypatch.context() as context:
        context.setattr(certs.datetime, "datetime", Past)
        certs.make_site(tmp_path, ["127.0.0.1"], days=30)
    gateway = Gateway(small_config(), credentials=security.load(tmp_path / "gateway", "gateway"))
    gateway.start()
    with pytest.raises(Refused, match="expired"):
        _announce(gateway, security.load(tmp_path / "actor", "actor"))
    gateway.stop(0.2)


def test_plaintext_to_tls_and_tls_to_plaintext_are_refused_without_a_downgrade(folder, secured):
    with pytest.raises(Refused, match="speaks TLS and this end plaintext"):
        _announce(secured, None)
    plain = Gateway(small_config())
    plain.start()
    with pytest.raises(Refused, match="speaks plaintext and this end TLS"):
        _announce(plain, security.load(folder / "actor", "actor"))
    plain.stop(0.2)


def test_a_wrong_token_is_refused_at_both_ends(folder, secured):
    wrong = dataclasses.replace(security.load(folder / "actor", "actor"), token="guess")
    with pytest.raises(Refused, match=r"UNAUTHENTICATED.*bearer token"):
        _announce(secured, wrong)
    assert secured.read_stats()["refused_calls"] >= 1


# What each role may call; every RPC of the service has its line here, so that a new one can't be forgotten.
RIGHTS = {
    "Describe": {"learner", "actor", "reader"},
    "Sample": {"learner"},
    "PublishWeights": {"learner"},
    "Checkpoint": {"learner"},
    "Insert": {"actor"},
    "WatchWeights": {"actor", "reader"},
    "Health": {"learner", "actor", "reader"},
}


def _call(connection, method) -> grpc.StatusCode:
    """Calls a method with an empty request of its own type; returns the status it ends with, OK for any answer."""
    description = pb.DESCRIPTOR.services_by_name["Gateway"].methods_by_name[method]
    request = getattr(pb, description.input_type.name)()
    call = getattr(rpc.GatewayStub(connection), method)
    try:
        response = call(iter([request]) if description.client_streaming else request, timeout=5)
        if description.server_streaming:
            next(response, None)
            response.cancel()
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_the_table_of_rights_names_every_call_and_is_the_one_that_holds():
    assert set(RIGHTS) == set(pb.DESCRIPTOR.services_by_name["Gateway"].methods_by_name)
    assert {role: {m for m in RIGHTS if role in RIGHTS[m]} for role in security.ROLES} == security._ALLOWED


@pytest.mark.parametrize("method", sorted(RIGHTS))
@pytest.mark.parametrize("role", security.ROLES)
def test_a_role_may_call_what_it_must_and_nothing_else(folder, secured, role, method):
    secured._weights.offer(Snapshot(1, 1, b"weights"))
    refused = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}
    with channel.open_channel(f"127.0.0.1:{secured.port}", security.load(folder / role, role)) as connection:
        status = _call(connection, method)
        if role in RIGHTS[method]:
            assert status not in refused
            assert secured.read_stats().get("refused_calls", 0) == 0
        else:
            assert status == grpc.StatusCode.PERMISSION_DENIED
            assert secured.read_stats()["refused_calls"] == 1


@pytest.mark.parametrize("method", sorted(RIGHTS))
def test_without_a_token_nothing_may_be_called(folder, secured, method):
    bare = dataclasses.replace(security.load(folder / "learner", "learner"), token="")
    with channel.open_channel(f"127.0.0.1:{secured.port}", bare) as connection:
        assert _call(connection, method) == grpc.StatusCode.UNAUTHENTICATED


def test_an_actor_on_another_host_inserts_follows_weights_and_health_over_tls(tmp_path):
    host = _outward_address()
    certs.make_site(tmp_path, [host], days=30)
    c = small_config(samples_per_insert=4.0)
    gateway = Gateway(c, host="0.0.0.0", credentials=security.load(tmp_path / "gateway", "gateway"))
    gateway.start()
    stop = threading.Event()
    actor = SiteClient(f"{host}:{gateway.port}", "actor", stop, security.load(tmp_path / "actor", "actor"))
    try:
        assert actor.announce(SPEC, timeout_s=10.0).run_id == gateway.run_id
        writer = Writer(actor)
        writer.write(20)
        writer.close()
        assert gateway._table.info()[1] == 20
        actor.start()
        for version in (1, 2):
            gateway._weights.offer(Snapshot(1, version, b"weights"))
            eventually(lambda version=version: (w := actor.newest_weights()) and w.version == version)
        gateway._pause = True
        eventually(lambda: actor.paused or gateway.__setattr__("_pause", True))
        # Without the certificate's name for it, the same gateway is nobody that it would speak to.
        with pytest.raises(Refused, match="certificate is refused"):
            _announce(gateway, security.load(tmp_path / "actor", "actor"))
    finally:
        actor.close()
        gateway.stop(0.2)


def _outward_address() -> str:
    """An address of this host beyond the loopback, or one of the loopback that is not the usual one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: asks the kernel which address it would send from
        except OSError:
            return "127.0.0.2"
        return probe.getsockname()[0]


def test_a_reader_can_not_announce_experience(folder, secured):
    reader = security.load(folder / "reader", "reader")
    with pytest.raises(Refused, match="only actors announce"):
        _announce(secured, reader, role="reader")
    with pytest.raises(Refused, match=r"PERMISSION_DENIED.*reader's"):
        _announce(secured, reader, role="actor")


def test_keys_and_tokens_are_the_owners_alone_and_the_gateway_holds_no_token(folder):
    for path in folder.rglob("*"):
        if path.suffix in (".key", ".token") or path.name == "tokens.json":
            assert path.stat().st_mode & 0o077 == 0, path
    tokens = [path.read_text().strip() for path in folder.rglob("*.token")]
    held = (folder / "gateway" / "tokens.json").read_text()
    assert len(set(tokens)) == 3 and not any(token in held for token in tokens)


def test_a_missing_file_names_itself_and_the_mend(tmp_path):
    with pytest.raises(ConfigError, match=r"learner\.token.*launchers\.certs"):
        security.load(tmp_path, "learner")


@pytest.mark.parametrize(
    "host,is_allowed", [("127.0.0.1", True), ("localhost", True), ("[::1]", True), ("10.1.2.3", False)]
)
def test_plaintext_is_for_the_loopback_unless_asked_for(host, is_allowed):
    if is_allowed:
        security.check_plaintext(host, None, False, "--host")
    else:
        with pytest.raises(ConfigError, match=r"--insecure"):
            security.check_plaintext(host, None, False, "--host")
        security.check_plaintext(host, None, True, "--host")

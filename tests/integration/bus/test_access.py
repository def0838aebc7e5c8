"""TLS to the bus, and who vouches for whom, with a real nats-server and an authority made for the test."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nkeys
import pytest
import trustme

from bus.errors import NotConnectedError, SettingsError
from bus.nats import NatsBus, NatsOptions, connect, options_from_environment, options_of
from bus.nats.access import NatsAccess
from bus.settings import CommonSettings, load_settings, load_with_origins, show_settings
from tests.support.nats import NatsServer
from tests.support.processes import python_process


@dataclass(frozen=True)
class Secured:
    """A server that demands TLS and a certificate of ours, and where the files lie."""

    server: NatsServer
    ca: str
    cert: str
    key: str

    @property
    def url(self) -> str:
        return self.server.url.replace("127.0.0.1", "localhost")

    @property
    def access(self) -> NatsAccess:
        return NatsAccess(user="a", password="secret-of-a", tls_ca=self.ca, tls_cert=self.cert, tls_key=self.key)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")
    for name, certificate in (("server", authority.issue_cert("localhost")), ("client", authority.issue_cert("a"))):
        certificate.private_key_pem.write_to_path(directory / f"{name}.key")
        for pem in certificate.cert_chain_pems:
            pem.write_to_path(directory / f"{name}.pem", append=True)
    config = (
        f'tls {{ cert_file: "{directory}/server.pem", key_file: "{directory}/server.key", '
        f'ca_file: "{directory}/ca.pem", verify: true }}\n'
        "authorization { user: a, password: secret-of-a }"
    )
    server = NatsServer(directory / "nats", config=config).start()
    yield Secured(server, f"{directory}/ca.pem", f"{directory}/client.pem", f"{directory}/client.key")
    server.kill()


async def bus_at(url: str, access: NatsAccess, timeout_s: float = 5.0) -> NatsBus:
    return await connect(url, name="test", timeout_s=timeout_s, options=NatsOptions(access=access))


@pytest.mark.parametrize("scheme", ["nats", "tls"])
async def test_both_sides_are_known(secured: Secured, scheme: str) -> None:
    """Messages pass under TLS, and again after the server was started anew."""
    bus = await bus_at(secured.url.replace("nats", scheme, 1), secured.access)
    try:
        await bus.flush()
        await asyncio.to_thread(secured.server.restart)
        async with asyncio.timeout(30):
            while not bus.connected or bus.stats().reconnects == 0:
                bus.changed.clear()
                await asyncio.wait_for(bus.changed.wait(), 30)
        await bus.flush()
    finally:
        await bus.close()


async def test_a_server_that_nobody_vouches_for_gets_nothing(secured: Secured, tmp_path: Path) -> None:
    """An authority that we do not know, a name that the certificate does not have, and no certificate of ours."""
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    strange = NatsAccess(tls_ca=str(tmp_path / "other.pem"))
    with pytest.raises(NotConnectedError, match="CERTIFICATE_VERIFY_FAILED"):
        await bus_at(secured.url, strange, 1.0)
    with pytest.raises(NotConnectedError, match="IP address mismatch"):
        await bus_at(secured.server.url, secured.access, 1.0)
    with pytest.raises(NotConnectedError):
        await bus_at(secured.url, NatsAccess(user="a", password="secret-of-a", tls_ca=secured.ca), 1.0)


async def test_no_password_goes_to_a_server_without_tls(nats_server: NatsServer, secured: Secured) -> None:
    """Where TLS is wanted, a server that says it does without is not believed: whoever stands between may say so."""
    for url in (nats_server.url.replace("nats://", "tls://"), nats_server.url):
        with pytest.raises(NotConnectedError, match="TLS is wanted"):
            await bus_at(url, secured.access, 0.5)


async def test_a_service_with_tls_and_a_password_file(secured: Secured, tmp_path: Path) -> None:
    """By its settings alone; nothing that it prints or logs has the password."""
    (tmp_path / "password").write_text("secret-of-a\n")
    environment = {
        "TIDEGATE_NATS_URL": secured.url.replace("nats", "tls", 1),
        "TIDEGATE_NATS_USER": "a",
        "TIDEGATE_NATS_PASSWORD_FILE": str(tmp_path / "password"),
        "TIDEGATE_NATS_TLS_CA": secured.ca,
        "TIDEGATE_NATS_TLS_CERT": secured.cert,
        "TIDEGATE_NATS_TLS_KEY": secured.key,
    }
    async with python_process("services.indexer", directory=tmp_path, environment=environment) as process:
        await process.wait_said("service_started")
        assert await process.stop() == 0
        assert "secret-of-a" not in process.output
    missing = {**environment, "TIDEGATE_NATS_PASSWORD_FILE": str(tmp_path / "nowhere")}
    async with python_process("services.indexer", directory=tmp_path, environment=missing) as process:
        assert await process.wait() == 2
        assert f"nats_password_file: {tmp_path}/nowhere cannot be read: No such file or directory" in process.stderr


def signed(issuer: nkeys.KeyPair, subject: nkeys.KeyPair, kind: str, **claims: Any) -> str:
    """A JWT as NATS wants it: ``issuer`` says of ``subject`` what it may."""

    def encoded(raw: bytes) -> str:
        return base64.urlsafe_b64encode(raw).decode().rstrip("=")

    body = {
        "jti": kind,
        "iat": int(time.time()),
        "iss": issuer.public_key.decode(),
        "sub": subject.public_key.decode(),
        "name": kind,
        "nats": {"type": kind, "version": 2, **claims},
    }
    text = f"{encoded(json.dumps({'typ': 'JWT', 'alg': 'ed25519-nkey'}).encode())}.{encoded(json.dumps(body).encode())}"
    return f"{text}.{encoded(issuer.sign(text.encode()))}"


async def test_a_credentials_file_of_an_operator(tmp_path: Path) -> None:
    """A server that trusts an operator's key knows who has a file that its account signed; nobody else gets in."""
    operator, account, user = (
        nkeys.from_seed(nkeys.encode_seed(os.urandom(32), kind))
        for kind in (nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_USER)
    )
    unlimited = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    house = signed(operator, account, "account", limits={**unlimited, "wildcards": True})
    pass_ = signed(account, user, "user", subs=-1, data=-1, payload=-1)
    (tmp_path / "user.creds").write_text(
        f"-----BEGIN NATS USER JWT-----\n{pass_}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    config = (
        f'operator: "{signed(operator, operator, "operator")}"\nresolver: MEMORY\n'
        f'resolver_preload {{ {account.public_key.decode()}: "{house}" }}'
    )
    server = NatsServer(tmp_path / "nats", jetstream=False, config=config).start()
    try:
        bus = await bus_at(server.url, NatsAccess(creds=str(tmp_path / "user.creds")))
        await bus.flush()
        await bus.close()
        with pytest.raises(NotConnectedError):
            await bus_at(server.url, NatsAccess(), 0.5)
    finally:
        server.kill()


async def test_several_servers_are_one_address(nats_server: NatsServer) -> None:
    """The first that answers is taken."""
    bus = await bus_at(f"nats://127.0.0.1:9, {nats_server.url}", NatsAccess())
    await bus.flush()
    await bus.close()


MISTAKES: list[tuple[dict[str, str], str]] = [
    ({"user": "a"}, "nats_user: needs nats_password or nats_password_file"),
    ({"password": "x"}, "nats_password: needs nats_user"),
    ({"user": "a", "password": "x", "password_file": "y"}, "nats_password: and nats_password_file are both set"),
    ({"user": "a", "password": "x", "creds": "y"}, "nats_creds: and nats_user are both set"),
    ({"creds": "/nowhere/c"}, "nats_creds: /nowhere/c cannot be read"),
    ({"tls_cert": "/nowhere/c"}, "nats_tls_cert: needs nats_tls_key"),
    ({"tls_ca": "/nowhere/c"}, "nats_tls_ca: /nowhere/c cannot be read"),
    ({"tls_ca": __file__}, "holds no certificate"),
    ({"inbox_prefix": "a.>"}, "nats_inbox_prefix: 'a.>' is not the beginning of a subject"),
]


@pytest.mark.parametrize(("given", "problem"), MISTAKES)
async def test_mistakes_are_named(given: dict[str, str], problem: str) -> None:
    """By the setting, before anything is dialled."""
    settings = load_settings(
        "ingress", CommonSettings, environ={}, overrides={f"nats_{k}": v for k, v in given.items()}
    )
    with pytest.raises(SettingsError, match=problem.replace("'", ".").replace(">", ".")):
        await connect("nats://127.0.0.1:9", name="test", timeout_s=0.1, options=options_of(settings))


def test_secrets_are_not_shown() -> None:
    """Neither by ``--print-config``, of several addresses too, nor by a traceback that shows the options."""
    url = "nats://a:s3cret@one:4222,tls://b:s3cret@two:4222"
    loaded = load_with_origins(
        "ingress", CommonSettings, environ={"TIDEGATE_NATS_URL": url, "TIDEGATE_NATS_PASSWORD": "s3cret"}
    )
    shown = show_settings(loaded, "ingress")
    assert "s3cret" not in shown
    assert "nats://***@one:4222,tls://***@two:4222" in shown
    assert "s3cret" not in repr(options_of(loaded.settings))


def test_commands_and_policies_take_the_environment() -> None:
    """The same variables as services, copies of streams too: what a command makes on a cluster is on the cluster."""
    given = {"TIDEGATE_NATS_USER": "watcher", "TIDEGATE_NATS_PASSWORD": "x", "TIDEGATE_NATS_REPLICAS": "3"}
    options = options_from_environment(given)
    assert (options.access, options.replicas) == (NatsAccess(user="watcher", password="x"), 3)
    assert options_from_environment({}) == NatsOptions()
    with pytest.raises(SettingsError, match="TIDEGATE_NATS_REPLICAS: must be 1 to 5, not 'many'"):
        options_from_environment({"TIDEGATE_NATS_REPLICAS": "many"})

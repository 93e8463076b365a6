"""``agn-optax keys``: its keys and tokens work, and only their owner can read them."""

import datetime
import json
import os
import stat

import jax.numpy as jnp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from helpers import sessions, shared
from helpers.commands import fails, succeeds

from agn_optax import errors, service
from agn_optax.ops import keys
from agn_optax.service import Access

RULE = shared.downpour()
HOSTS = ("--host=localhost", "--host=127.0.0.1")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys") / "here"
    names = ("--chief=anna", "--worker=bert", "--operator=olga")
    reply = json.loads(succeeds("keys", folder, *HOSTS, *names, "--json"))
    assert sorted(reply["files"]) == sorted(map(str, folder.iterdir()))
    return folder


def tls(folder, name):
    return service.tls(*(folder / f for f in ("ca.pem", f"{name}.pem", f"{name}.key")))


@pytest.mark.parametrize("transport", ["grpc", "socket"])
@pytest.mark.parametrize("by", ["token", "both"])
def test_center_and_clients_work_with_the_made_keys(made, transport, by):
    mutual = tls(made, "center")
    access = Access(made / "tokens")
    mine = mutual if by == "both" else mutual._replace(ca=None)
    with service.serve(
        RULE, security=service.Security(tls=mine, access=access)
    ) as server:

        def connect(name):
            shown = tls(made, name)
            settings = {"transports": [transport], "timeout": 20}
            settings["token"] = made / f"{name}.token"
            if by == "token":
                shown = shown._replace(certificate=None, key=None)
            return service.connect(server.address, RULE, tls=shown, **settings)

        with connect("anna") as anna, connect("bert") as bert, connect("olga") as olga:
            with pytest.raises(errors.NotAllowedError, match="role chief"):
                bert.initialize(jnp.zeros(3), worker="bert")
            anna.initialize(jnp.zeros(3), worker="anna")
            sessions.exchange(bert, jnp.ones(3), anchor_version=0, worker="bert")
            with pytest.raises(errors.NotAllowedError, match="worker 'bert'"):
                bert.join("anna")
            with pytest.raises(errors.NotAllowedError, match="worker or chief"):
                olga.join("olga")
            assert olga.pull().version == 1
        with (
            pytest.raises(errors.CenterUnreachableError),
            service.connect(server.address, RULE, timeout=1),
        ):
            pass


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_certificates_are_readable_by_others_if_umask_allows(tmp_path, umask):
    folder = tmp_path / "here"
    before = os.umask(umask)
    try:
        succeeds("keys", folder, *HOSTS, "--chief=anna", "--worker=bert")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        mode = 0o644 if path.suffix == ".pem" else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == mode & ~umask


def test_keys_can_be_added_later(made):
    before = {path: path.read_bytes() for path in made.iterdir()}
    succeeds("keys", made, "--worker=carl")
    for path, content in before.items():
        assert path.read_bytes().startswith(content)
    assert stat.S_IMODE((made / "tokens").stat().st_mode) == 0o600
    names = [line.split()[:2] for line in (made / "tokens").read_text().splitlines()]
    assert ["worker", "carl"] in names
    assert ["chief", "anna"] in names
    with service.serve(
        RULE, jnp.zeros(3), security=service.Security(tls=tls(made, "center"))
    ) as server:
        service.connect(server.address, RULE, tls=tls(made, "carl")).close()


def write_authority(folder, key, password=None):
    """Write the certificate and the key of an authority made elsewhere."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "mine")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(True, None), critical=True)
        .sign(key, hashes.SHA256() if isinstance(key, rsa.RSAPrivateKey) else None)
    )
    pem = serialization.Encoding.PEM
    encryption = (
        serialization.NoEncryption()
        if password is None
        else serialization.BestAvailableEncryption(password)
    )
    (folder / "ca.pem").write_bytes(certificate.public_bytes(pem))
    (folder / "ca.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption)
    )


def test_authority_can_have_a_key_of_rsa(tmp_path):
    write_authority(tmp_path, rsa.generate_private_key(65537, 2048))
    succeeds("keys", tmp_path, *HOSTS, "--worker=anna")
    security = service.Security(tls=tls(tmp_path, "center"))
    settings = {"timeout": 20, "tls": tls(tmp_path, "anna")}
    with (
        service.serve(RULE, jnp.zeros(3), security=security) as server,
        service.connect(server.address, RULE, **settings) as center,
    ):
        sessions.exchange(center, jnp.ones(3), anchor_version=0, worker="anna")


@pytest.mark.parametrize(
    ("key", "password"),
    [
        (rsa.generate_private_key(65537, 2048), b"secret"),
        (ed25519.Ed25519PrivateKey.generate(), None),
    ],
    ids=["password", "ed25519"],
)
def test_key_of_an_authority_that_cannot_be_used_is_rejected(tmp_path, key, password):
    write_authority(tmp_path, key, password)
    assert "cannot read" in fails("keys", tmp_path, "--worker=anna", code=2)
    assert not (tmp_path / "tokens").exists()
    assert not (tmp_path / "anna.key").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to make"),
        (["--worker=a/b"], "a name must have 1 to 64 characters"),
        (["--worker=*"], "a name must have"),
        (["--worker=" + "x" * 65], "a name must have"),
        (["--worker=anna", "--chief=anna"], "names must differ"),
        (["--worker=center"], "names must differ, also from ca and center"),
    ],
)
def test_bad_names_are_rejected(tmp_path, arguments, message):
    assert message in fails("keys", tmp_path / "new", *arguments, code=2)
    assert not (tmp_path / "new").exists()


def test_keys_overwrites_no_file(made):
    before = (made / "bert.key").read_bytes()
    output = fails("keys", made, "--worker=bert", code=2)
    assert "bert.pem" in output
    assert "exist already" in output
    assert (made / "bert.key").read_bytes() == before


@pytest.mark.parametrize("lost", ["ca.key", "ca.pem"])
def test_authority_without_one_of_its_files_is_rejected(tmp_path, lost):
    succeeds("keys", tmp_path, "--worker=anna")
    (tmp_path / lost).unlink()
    before = sorted(tmp_path.iterdir())
    output = fails("keys", tmp_path, "--worker=bert", code=2)
    assert f"without {lost}" in " ".join(output.split())
    assert sorted(tmp_path.iterdir()) == before


def test_broken_off_command_can_be_repeated_after_a_cleanup(tmp_path):
    """The error names every file in the way; the center knows every token."""
    folder = tmp_path / "keys"
    succeeds("keys", folder, "--worker=anna", "--worker=bert")
    (folder / "bert.pem").unlink()
    output = fails("keys", folder, "--worker=carl", "--worker=bert", code=2)
    for kind in ("key", "token"):
        assert f"bert.{kind}" in output
        (folder / f"bert.{kind}").unlink()
    assert not (folder / "carl.pem").exists()
    succeeds("keys", folder, "--worker=carl", "--worker=bert")
    known = Access(folder / "tokens")
    for name in ("anna", "bert", "carl"):
        known.caller((folder / f"{name}.token").read_bytes().strip())


def test_certificate_is_the_last_of_the_files_of_a_name(tmp_path):
    """Every name with a certificate is thus known to the center."""
    (tmp_path / "anna.pem").symlink_to(tmp_path / "missing")  # it cannot be written
    with pytest.raises(FileExistsError, match=r"anna\.pem"):
        keys.make(tmp_path, [], {"worker": ["anna"]}, 1)
    token = (tmp_path / "anna.token").read_text().strip()
    assert f"worker anna {token}\n" in (tmp_path / "tokens").read_text()

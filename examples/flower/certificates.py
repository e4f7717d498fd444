"""Throw-away certificates and keys for a federation on this machine: python certificates.py FOLDER NODES

ca.pem                       the authority that everybody trusts; its key is not kept
superlink.pem, superlink.key TLS for the SuperLink, and for each SuperNode's own local API
node-K, node-K.pub           key pair of SuperNode K, as `ssh-keygen -t ecdsa -b 384` makes them
"""

import datetime
import ipaddress
import os
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DAYS = 7
OPENSSH = serialization.PrivateFormat.OpenSSH


def make(folder: Path, nodes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    authority, key = new_key(), new_key()
    issuer, subject = name("throw-away authority"), name("localhost")
    save(folder / "ca.pem", signed(issuer, issuer, authority, authority, authority_extensions()))
    local = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    names = x509.SubjectAlternativeName(local)
    save(folder / "superlink.pem", signed(subject, issuer, key, authority, [(names, False)]))
    save(folder / "superlink.key", private(key, serialization.PrivateFormat.TraditionalOpenSSL), secret=True)
    for k in range(nodes):
        node = new_key()
        save(folder / f"node-{k}", private(node, OPENSSH), secret=True)
        save(folder / f"node-{k}.pub", public(node))


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])


def authority_extensions() -> list[tuple[x509.ExtensionType, bool]]:
    """Python 3.13 and newer trust no authority that does not say what its key may do."""
    other = "digital_signature content_commitment key_encipherment data_encipherment key_agreement encipher_only"
    no = dict.fromkeys([*other.split(), "decipher_only"], False)
    usage = x509.KeyUsage(key_cert_sign=True, crl_sign=True, **no)
    return [(x509.BasicConstraints(ca=True, path_length=0), True), (usage, True)]


def signed(
    subject: x509.Name, issuer: x509.Name, key, by, extensions: list[tuple[x509.ExtensionType, bool]], days: int = DAYS
) -> bytes:
    now = datetime.datetime.now(datetime.UTC)
    request = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    request = request.not_valid_before(now - datetime.timedelta(minutes=5))
    request = request.not_valid_after(now + datetime.timedelta(days=days))
    identifiers = [
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), False),
    ]
    for extension, critical in [*extensions, *identifiers]:
        request = request.add_extension(extension, critical)
    return request.sign(by, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def private(key, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def public(key) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def save(path: Path, content: bytes, secret: bool = False) -> None:
    """A secret is never readable by others, not even before it is whole."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
        file.write(content)


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))

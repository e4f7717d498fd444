"""Certificates and keys of a deployment. Makes what is missing and replaces nothing: to renew a file, delete it first.

python keys.py FOLDER [--nodes 3] [--days 90] [--names gateway localhost fleet.example.org]

authority/ca.key                 signs certificates; no service needs it, keep it off the servers
trust/ca.crt                     everybody trusts it
superlink/tls.crt, tls.key       TLS of the SuperLink
gateway/tls.crt, tls.key         TLS of the gateway; --names are those by which clients call it
superexec/secret                 shared by SuperLink and SuperExec
nodes/K/key, public/node-K.pub   key pair of SuperNode K
grafana/password                 of Grafana's user admin
"""

import argparse
import ipaddress
import secrets
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "flower"))
import certificates

AUTHORITY_DAYS = 3650
SUPERLINK = ["superlink", "localhost", "127.0.0.1"]


def make(folder: Path, nodes: int, days: int, names: list[str]) -> list[Path]:
    """The files that were missing and have been made."""
    new: list[Path] = []
    authority = folder / "authority" / "ca.key"
    trusted = folder / "trust" / "ca.crt"
    if authority.exists() != trusted.exists():
        raise SystemExit(f"keys.py: {authority} and {trusted} belong together, but only one of them exists")
    if not authority.exists():
        key = certificates.new_key()
        issuer = certificates.name("SecureAFL deployment")
        put(new, authority, certificates.private(key, serialization.PrivateFormat.PKCS8), secret=True)
        content = certificates.signed(issuer, issuer, key, key, certificates.authority_extensions(), AUTHORITY_DAYS)
        put(new, trusted, content)
    for service, called in (("superlink", SUPERLINK), ("gateway", names)):
        if not (folder / service / "tls.crt").exists():
            certify(new, folder, service, called, days)
    if not (folder / "superexec" / "secret").exists():
        put(new, folder / "superexec" / "secret", secrets.token_bytes(32), secret=True)
    if not (folder / "grafana" / "password").exists():
        put(new, folder / "grafana" / "password", secrets.token_urlsafe(24).encode(), secret=True)
        (folder / "grafana" / "password").chmod(0o640)  # Grafana has a user of its own, in our group
    for k in range(nodes):
        if not (folder / "nodes" / str(k) / "key").exists():
            key = certificates.new_key()
            put(new, folder / f"nodes/{k}/key", certificates.private(key, certificates.OPENSSH), secret=True)
            put(new, folder / f"public/node-{k}.pub", certificates.public(key))
    return new


def certify(new: list[Path], folder: Path, service: str, called: list[str], days: int) -> None:
    """A new key for this service, and a certificate for these names and addresses."""
    authority = serialization.load_pem_private_key((folder / "authority" / "ca.key").read_bytes(), None)
    issuer = x509.load_pem_x509_certificate((folder / "trust" / "ca.crt").read_bytes()).subject
    key = certificates.new_key()
    names = [(x509.SubjectAlternativeName([general_name(text) for text in called]), False)]
    content = certificates.signed(certificates.name(called[0]), issuer, key, authority, names, days)
    put(new, folder / service / "tls.key", certificates.private(key, serialization.PrivateFormat.PKCS8), secret=True)
    put(new, folder / service / "tls.crt", content)


def general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def put(new: list[Path], path: Path, content: bytes, secret: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    certificates.save(path, content, secret)
    new.append(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--days", type=int, default=90, help="that the certificates of SuperLink and gateway are valid")
    parser.add_argument("--names", nargs="+", default=["gateway", "localhost", "127.0.0.1"], help="of the gateway")
    chosen = parser.parse_args()
    for path in make(chosen.folder, chosen.nodes, chosen.days, chosen.names):
        print(path)


if __name__ == "__main__":
    main()

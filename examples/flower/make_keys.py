"""Make a certificate authority, the certificate of a server, and the keys of nodes.

    python make_keys.py FOLDER NUMBER_OF_NODES [NAME_OR_ADDRESS_OF_THE_SERVER ...]

It writes `ca.crt`, which everybody needs, `server.pem` and `server.key`, which stay with the server, and for every node
`node0`, which stays with it, and `node0.pub`, which the server needs. The certificate holds for these names and
addresses, and for localhost: a part of the SuperLink connects to it from the same machine.
"""

import datetime
import ipaddress
import os
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 365
# A SuperLink that listens at 0.0.0.0 or [::] is called by its own parts at these.
ITSELF = ("localhost", "127.0.0.1", "::1")
NOT_USED = dict.fromkeys(
    ("content_commitment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only", "key_encipherment"),
    False,
)


def _write(path, data, secret=False):
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if secret else 0o644), "wb") as file:
        file.write(data)


def _private(key, form=serialization.PrivateFormat.PKCS8):
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _name(text):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _begun(subject, key):
    now = datetime.datetime.now(datetime.UTC)
    certificate = x509.CertificateBuilder().subject_name(_name(subject)).issuer_name(_name("federation's authority"))
    certificate = certificate.public_key(key.public_key()).serial_number(x509.random_serial_number())
    return certificate.not_valid_before(now - datetime.timedelta(minutes=5)).not_valid_after(
        now + datetime.timedelta(days=DAYS)
    )


def _named(place):
    try:
        return x509.IPAddress(ipaddress.ip_address(place))
    except ValueError:
        return x509.DNSName(place)


def write(folder, nodes, places=()):
    """Write all of them, for a server at these places, and return the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = [_named(place) for place in dict.fromkeys((*places, *ITSELF))]
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    own = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    root = (
        _begun("federation's authority", authority)
        .add_extension(x509.BasicConstraints(True, 0), True)
        .add_extension(x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **NOT_USED), True)
        .add_extension(own, False)
        .sign(authority, hashes.SHA256())
    )
    leaf = (
        _begun("server", server)
        .add_extension(x509.BasicConstraints(False, None), True)
        .add_extension(x509.SubjectAlternativeName(names), False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own), False)
        .sign(authority, hashes.SHA256())
    )
    _write(folder / "ca.crt", root.public_bytes(serialization.Encoding.PEM))
    _write(folder / "server.pem", leaf.public_bytes(serialization.Encoding.PEM))
    _write(folder / "server.key", _private(server), secret=True)
    for node in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())  # the curve and the form that Flower wants
        _write(folder / f"node{node}", _private(key, serialization.PrivateFormat.OpenSSH), secret=True)
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        _write(folder / f"node{node}.pub", public + b"\n")
    return folder


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), sys.argv[3:])

"""The key by which the nodes of one attempt authenticate each other when their connections go through a tunnel."""

from __future__ import annotations

import datetime

from worker_entry.protocol.orders import TunnelKey

LASTS = datetime.timedelta(days=3650)
"""Long, because attempts may last and clocks may be wrong; only the nodes know the key, and forget it at the end."""
NAME = "distlaunch"


def make_tunnel_key() -> TunnelKey:
    """A new key (ECDSA, P-256) with a self-signed certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - LASTS)
        .not_valid_after(now + LASTS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return TunnelKey(certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode())

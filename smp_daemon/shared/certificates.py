"""Whether the certificates of a process let it in at others: it shakes hands with itself, in memory, as two SMPs do."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime

from holdfast.smp_daemon.shared.credentials import TLS_ENVS, Tls
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.settings import TLS_NAME

TURNS = 8
"""More than a handshake of two sides that take turns needs."""


def check_certificates(tls: Tls) -> datetime:
    """When the certificate expires. Blocks for a few milliseconds, and uses no network.

    Raises:
        ConfigError: another node with the same CA and name would refuse the certificate: it is not for that name, not
            signed by that CA, not valid now, or not for both sides of a connection.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = tls.client.wrap_bio(to_client, to_server, server_hostname=tls.name)
    server = tls.server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for turn in range(2 * TURNS):
            try:
                (client, server)[turn % 2].do_handshake()
            except ssl.SSLWantReadError:
                continue  # the other side's turn
        shown = client.getpeercert() or {}
        return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(shown["notAfter"])), UTC)
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "verify_message", "") or str(error)
        raise ConfigError(
            f"other nodes would refuse the certificate of {TLS_ENVS[0]}: {why}: it must be valid, signed by the CA of "
            f"{TLS_ENVS[2]}, and for the DNS name {tls.name!r} of {TLS_NAME.variable}"
        ) from error

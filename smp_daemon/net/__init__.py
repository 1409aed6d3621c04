"""Other SMPs: connections, authentication, gRPC."""

__all__ = ["gate", "links", "peers", "refusals"]

"""Other SMPs: connections, authentication, gRPC."""

__all__ = ["gate", "links", "listener", "peers", "refusals"]

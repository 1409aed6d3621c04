"""Other SMPs: connections, authentication, gRPC."""

__all__ = ["authenticator", "links", "listener", "peers"]

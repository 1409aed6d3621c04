"""Other SMPs: connections, authentication, gRPC."""

"""How often to take snapshots, and how safe that is: pure functions, without torch."""

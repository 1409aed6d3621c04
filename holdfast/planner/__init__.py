"""How often to take snapshots, and how safe the state then is. Pure functions, without torch."""

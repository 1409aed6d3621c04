"""Networks and clocks between real processes, and what goes wrong with them."""

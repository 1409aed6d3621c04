"""How long a test waits for what must happen."""

DEADLINE_S = 120.0
"""Nothing moves any more after so long, however busy the machine is. A test that passes never waits for it to end."""

"""Where a step begins and ends, what is captured there, and the thread that copies it."""

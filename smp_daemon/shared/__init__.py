"""What both sides of the socket use: formats, limits, errors, paths, logs, and the client.

All of `smp_daemon` that trainers may import.
"""

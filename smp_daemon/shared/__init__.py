"""Code that SMPs and trainers share: formats, limits, errors, paths, logs, and the client.

Trainers may import nothing else of `smp_daemon`.
"""

"""Attempts to break a running SMP, one file for each kind of attack. After every attempt, the SMPs must be alive,
without extra memory or file descriptors, and give an honest trainer every byte back: see `victim.Victim.check`.
"""

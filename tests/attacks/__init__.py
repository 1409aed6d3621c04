"""Live attempts to break a running SMP, a file for each family. After every one of them the SMPs must be alive, small,
without a descriptor too many, and give an honest trainer every byte back: see `victim.Victim.check`.
"""

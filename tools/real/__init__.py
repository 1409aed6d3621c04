"""``make real``: third-party training scripts, undisturbed and killed, compared to the last bit.

`registry` lists the scripts, `probe` records what they compute, `driver` kills them, and `comparison` decides. Only
packages from the package index are downloaded: data sets are generated, and ``REAL`` names the folder of checkouts.
"""

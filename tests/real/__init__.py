"""``make real``: training scripts that nobody here wrote, undisturbed and killed, compared to the last bit.

`registry` says what is run, `probe` writes down what happens inside of it, `driver` kills it, `comparison` decides.
Nothing is fetched but packages from the package index: data sets are made here, and checkouts lie where ``REAL`` says.
"""
